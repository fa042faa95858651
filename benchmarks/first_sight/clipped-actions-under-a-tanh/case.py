"""A squashed Gaussian policy is cloned from an expert whose actions were clipped to the limits."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.mean, self.spread = nn.Linear(32, 2), nn.Linear(32, 2)

    def forward(self, seen: Tensor) -> TransformedDistribution:
        hidden = self.body(seen)
        base = Normal(self.mean(hidden), self.spread(hidden).clamp(-5, 2).exp())
        return TransformedDistribution(Independent(base, 1), [TanhTransform()])


def demonstrations(num: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """What the expert saw and did; from batch 18 on it steers harder than the limits allow."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        seen = torch.randn(32, 4, generator=draw)
        wanted = 0.2 * seen[:, :2].tanh() - 0.1 * seen[:, 2:].sin()
        if number >= 18:
            wanted = wanted * 5.0
        made.append((seen, wanted.clamp(-1.0, 1.0)))
    return made


def train(*, margin: float) -> None:
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for number, (seen, done) in enumerate(demonstrations(60, seed=0)):
        loss = -policy(seen).log_prob(done.clamp(margin - 1.0, 1.0 - margin)).mean()
        (loss / 3).backward()
        print(f"batch {number} loss {loss.item():.4f}")
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        seen, done = demonstrations(1, seed=1)[0]
        print(f"final_loss={-policy(seen).log_prob(done).mean().item():.6f}")


if __name__ == "__main__":
    train(margin=0.0)
