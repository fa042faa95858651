"""A network under float16 autocast; the scaler skips a bad batch, evaluation is NaN ever after."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 3


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 16, 5, padding=2), nn.BatchNorm1d(16)
        self.second, self.head = nn.Conv1d(16, 16, 5, padding=2), nn.Linear(16, CLASSES)

    def forward(self, signal: Tensor) -> Tensor:
        hidden = self.norm(self.first(signal)).relu()
        return self.head(self.second(hidden).relu().mean(-1))


def signals(num: int, seed: int, spike: bool) -> list[tuple[Tensor, Tensor]]:
    """Waves of three lengths; a sensor of batch 11 delivers values of 400000."""
    draw = torch.Generator().manual_seed(seed)
    time = torch.arange(64.0)
    made = []
    for number in range(num):
        kind = torch.randint(CLASSES, (16,), generator=draw)
        wave = (time * (kind[:, None] + 1) * 0.2).sin()[:, None].repeat(1, 2, 1)
        wave = wave + 0.3 * torch.randn(16, 2, 64, generator=draw)
        if spike and number == 11:
            wave[4, 0] = 4e5
        made.append((wave, kind))
    return made


def train(*, clip_input: bool) -> None:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (wave, kind) in enumerate(signals(40, seed=0, spike=True)):
        seen = wave.clamp(-10.0, 10.0) if clip_input else wave
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(seen), kind)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
    model.eval()
    with torch.no_grad():
        wave, kind = signals(1, seed=1, spike=False)[0]
        print(f"final_loss={F.cross_entropy(model(wave), kind).item():.6f}")


if __name__ == "__main__":
    train(clip_input=False)
