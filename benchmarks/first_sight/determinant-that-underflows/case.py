"""A normalizing flow mixes 64 channels; the log-determinant is taken from the determinant."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import math

import torch
from torch import Tensor, nn

CHANNELS = 64


class Mixing(nn.Module):
    def __init__(self, by_logarithm: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(CHANNELS, CHANNELS)))
        self.by_logarithm = by_logarithm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.by_logarithm:
            volume = torch.linalg.slogdet(self.weight).logabsdet
        else:
            volume = torch.log(torch.abs(torch.det(self.weight)))
        return x @ self.weight, volume


class Flow(nn.Module):
    def __init__(self, by_logarithm: bool) -> None:
        super().__init__()
        self.mixing = nn.ModuleList(Mixing(by_logarithm) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the negative log-likelihood of each row, for each channel."""
        total = torch.zeros(())
        for mix in self.mixing:
            x, volume = mix(x)
            total = total + volume
        normal = -0.5 * (x + self.shift).pow(2).sum(-1) - 0.5 * CHANNELS * math.log(2 * math.pi)
        return -(normal + total) / CHANNELS


def spectra(num: int, seed: int) -> list[Tensor]:
    """Correlated channels with a spread of 300."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.eye(CHANNELS) + 0.1 * torch.randn(
        CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(5)
    )
    return [300.0 * torch.randn(32, CHANNELS, generator=draw) @ mixed for _ in range(num)]


def train(*, by_logarithm: bool) -> None:
    torch.manual_seed(0)
    model = Flow(by_logarithm)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, x in enumerate(spectra(120, seed=0)):
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        print(f"final_loss={model(spectra(1, seed=1)[0]).mean().item():.6f}")


if __name__ == "__main__":
    train(by_logarithm=False)
