"""A network normalises by mean of squares minus square of the mean; its inputs are large."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FastNorm(nn.Module):
    def __init__(self, width: int, two_passes: bool) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.two_passes = two_passes

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.two_passes:
            variance = (x - mean).pow(2).mean(-1, keepdim=True)
        else:
            variance = (x.pow(2).mean(-1, keepdim=True) - mean.pow(2)).clamp(min=0)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.gain + self.shift


def spectra(num: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Small lines on a large background; which line is there is to be told."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        kind = torch.randint(4, (32,), generator=draw)
        lines = 0.2 * torch.randn(32, 24, generator=draw)
        lines[torch.arange(32), kind * 6] += 2.0
        made.append((lines + 4000.0 + 500.0 * torch.rand(32, 1, generator=draw), kind))
    return made


def train(*, two_passes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FastNorm(24, two_passes), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, (seen, kind) in enumerate(spectra(80, seed=0)):
        loss = F.cross_entropy(model(seen), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        seen, kind = spectra(1, seed=1)[0]
        print(f"final_loss={F.cross_entropy(model(seen), kind).item():.6f}")


if __name__ == "__main__":
    train(two_passes=False)
