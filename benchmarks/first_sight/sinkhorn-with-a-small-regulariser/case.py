"""Points are matched by entropic transport; the regulariser is small against the distances."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import math

import torch
from torch import Tensor, nn

POINTS, ROUNDS, REGULARISER = 12, 20, 0.02


def plan_by_scaling(cost: Tensor) -> Tensor:
    kernel = torch.exp(-cost / REGULARISER)
    share = torch.full((POINTS,), 1 / POINTS)
    column = torch.ones(POINTS)
    for _ in range(ROUNDS):
        row = share / (kernel @ column)
        column = share / (kernel.T @ row)
    return row[:, None] * kernel * column


def plan_by_logarithms(cost: Tensor) -> Tensor:
    kernel = -cost / REGULARISER
    share = torch.full((POINTS,), -math.log(POINTS))
    column = torch.zeros(POINTS)
    for _ in range(ROUNDS):
        row = share - torch.logsumexp(kernel + column, dim=1)
        column = share - torch.logsumexp(kernel + row[:, None], dim=0)
    return (row[:, None] + kernel + column).exp()


def clouds(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """A cloud and where it went; later ones went farther."""
    draw = torch.Generator().manual_seed(100 * seed + step)
    cloud = torch.rand(POINTS, 2, generator=draw) * 0.5
    turned = cloud @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) * 0.5
    return cloud, turned + (1.6 if step >= 14 and seed == 0 else 0.1)


def train(*, by_logarithms: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    plan = plan_by_logarithms if by_logarithms else plan_by_scaling

    def loss_of(cloud: Tensor, target: Tensor) -> Tensor:
        cost = (model(cloud)[:, None] - target).pow(2).sum(-1)
        return (plan(cost) * cost).sum()

    for step in range(40):
        loss = loss_of(*clouds(step, seed=0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.5f}")
    with torch.no_grad():
        print(f"final_loss={loss_of(*clouds(0, seed=1)).item():.6f}")


if __name__ == "__main__":
    train(by_logarithms=False)
