"""Rotary positions are counted in bfloat16: from 256 on neighbours share a position."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from tiny import VOCAB, build


class Rotary(nn.Module):
    """Rotary embeddings that count in one format."""

    def __init__(self, width: int, *, count: torch.dtype) -> None:
        super().__init__()
        powers = torch.arange(0, width, 2) / width
        self.register_buffer("inv_freq", 1.0 / 10000.0**powers, persistent=False)
        self.count = count

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].to(self.count) * self.inv_freq.to(self.count)
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def recall(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return long rows in which each token repeats the one before the last."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num):
        pair = torch.randint(3, VOCAB, (1, 2), generator=generator)
        noise = torch.randint(3, VOCAB, (1, 400), generator=generator)
        ids = torch.cat((noise, pair.repeat(1, 40)), 1)
        labels = ids.clone()
        labels[:, :402] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


@torch.no_grad()
def last(model: nn.Module, batch: dict[str, Tensor]) -> float:
    model.eval()
    return float(model(**batch).loss)


def train(*, count: torch.dtype) -> None:
    model = build("LlamaForCausalLM", num_hidden_layers=2, max_position_embeddings=512)
    model.model.rotary_emb = Rotary(16, count=count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in recall(16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    print(f"final_loss={last(model, recall(1, seed=1)[0]):.6f}")


if __name__ == "__main__":
    train(count=torch.bfloat16)
