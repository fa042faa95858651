"""A small network is fitted with L-BFGS at a fixed step of 1, without a line search."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn


def wave(num: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, num)[:, None]
    return x, (6 * x).sin() * (1 + x.abs()) * 30.0


def train(*, search: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=20, line_search_fn=search)
    x, y = wave(64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).pow(4).mean()
        loss.backward()
        return loss

    for step in range(12):
        loss = optimizer.step(closure)
        print(f"step {step} loss {loss.item():.5g}")
    x, y = wave(41)
    with torch.no_grad():
        print(f"final_loss={(model(x) - y).pow(4).mean().item():.6f}")


if __name__ == "__main__":
    train(search=None)
