"""A mixture density network: the likelihood of a far point under every component is 0."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import math

import torch
from torch import Tensor, nn


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh())
        self.share, self.middle, self.width = nn.Linear(32, 5), nn.Linear(32, 5), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x)
        width = nn.functional.softplus(self.width(hidden)) + 0.05
        return self.share(hidden), self.middle(hidden), width


def likelihood_by_sum(share: Tensor, middle: Tensor, width: Tensor, y: Tensor) -> Tensor:
    density = torch.exp(-0.5 * ((y - middle) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return torch.log((share.softmax(-1) * density).sum(-1))


def likelihood_by_logarithms(share: Tensor, middle: Tensor, width: Tensor, y: Tensor) -> Tensor:
    density = -0.5 * ((y - middle) / width) ** 2 - width.log() - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp(share.log_softmax(-1) + density, dim=-1)


def points(num: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """A curve with two branches; in batch 31 one sensor reads 40."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        x = torch.rand(64, 1, generator=draw) * 2 - 1
        branch = torch.randint(2, (64, 1), generator=draw) * 2.0 - 1.0
        y = branch * x.cos() + 0.1 * torch.randn(64, 1, generator=draw)
        if seed == 0 and number == 31:
            y[17] = 40.0
        made.append((x, y))
    return made


def train(*, by_logarithms: bool) -> None:
    torch.manual_seed(0)
    model = MixtureDensity()
    likelihood = likelihood_by_logarithms if by_logarithms else likelihood_by_sum
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (x, y) in enumerate(points(80, seed=0)):
        loss = -likelihood(*model(x), y).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 5 == 1:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        x, y = points(1, seed=1)[0]
        print(f"final_loss={-likelihood(*model(x), y).mean().item():.6f}")


if __name__ == "__main__":
    train(by_logarithms=False)
