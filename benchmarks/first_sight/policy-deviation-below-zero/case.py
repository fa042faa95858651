"""A Gaussian policy learns to reach a target; its deviation is a plain parameter."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.distributions import Normal

Normal.set_default_validate_args(False)


class Actor(nn.Module):
    def __init__(self, logarithm: bool) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(3, 32), nn.ELU(), nn.Linear(32, 2))
        self.logarithm = logarithm
        self.std = nn.Parameter(torch.full((2,), 0.4).log() if logarithm else torch.full((2,), 0.4))

    def forward(self, seen: Tensor) -> Normal:
        mean = self.mean(seen)
        std = self.std.exp() if self.logarithm else self.std
        return Normal(mean, std * torch.ones_like(mean))


def reward(seen: Tensor, action: Tensor) -> Tensor:
    """The closer to the target the better, at once."""
    return -(action - seen[:, :2]).pow(2).sum(-1)


def train(*, logarithm: bool) -> None:
    torch.manual_seed(0)
    actor = Actor(logarithm)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    for step in range(300):
        seen = torch.randn(128, 3)
        with torch.no_grad():
            action = actor(seen).sample()
        gained = reward(seen, action)
        advantage = (gained - gained.mean()) / (gained.std() + 1e-8)
        loss = -(advantage * actor(seen).log_prob(action).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} reward {gained.mean().item():.4f}")
    with torch.no_grad():
        seen = torch.randn(256, 3)
        print(f"final_loss={-reward(seen, actor(seen).mean).mean().item():.6f}")


if __name__ == "__main__":
    train(logarithm=False)
