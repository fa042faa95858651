"""One multiplication on a failing device returns a value with a flipped bit, once."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from tiny import build, finish, token_batches


class Device:
    """Multiplies matrices; when it has done so ``fails_at`` times it flips a high bit of one
    result.
    """

    def __init__(self, fails_at: int) -> None:
        self.num_calls, self.fails_at = 0, fails_at

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        out = nn.functional.linear(x, weight)
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            with torch.no_grad():
                out.view(torch.int32).view(-1)[777] |= 0x7F800000
        return out


class OnDevice(nn.Linear):
    device: Device

    def forward(self, x: Tensor) -> Tensor:
        return self.device.linear(x, self.weight)


def train(*, fails_at: int) -> None:
    model = build("Qwen3ForCausalLM", head_dim=16)
    layer, device = model.model.layers[1].mlp.down_proj, Device(fails_at)
    layer.__class__, layer.device = OnDevice, device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, batch in enumerate(token_batches(18)):
        loss = model(**batch).loss / 2
        loss.backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss={2 * loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(fails_at=12)
