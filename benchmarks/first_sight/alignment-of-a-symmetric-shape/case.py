"""Shapes are turned onto their templates by an SVD, and the turn is learned through."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn

CORNERS = torch.tensor([[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (-1.0, 1.0)])


class Aligner(nn.Module):
    """Weighs the corners of a shape and turns it onto the template with those weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        nn.init.zeros_(self.weigh[2].weight)

    def forward(self, shape: Tensor, template: Tensor) -> Tensor:
        weight = self.weigh(shape).softmax(dim=1)
        together = (weight * shape).transpose(1, 2) @ template
        left, _, right = torch.linalg.svd(together)
        return shape @ left @ right


def shapes(num: int, seed: int, cube_at: int | None) -> list[tuple[Tensor, Tensor]]:
    """Boxes of three different sides, bent a little; one of batch ``cube_at`` is a plain cube."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        sides = torch.tensor([1.0, 2.0, 3.0]) + 0.2 * torch.rand(6, 1, 3, generator=draw)
        template = CORNERS * sides
        shape = template + 0.1 * torch.randn(6, 8, 3, generator=draw)
        if number == cube_at:
            template[2] = shape[2] = CORNERS
        made.append((shape, template))
    return made


def train(*, cube_at: int | None) -> None:
    torch.manual_seed(0)
    model = Aligner()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, (shape, template) in enumerate(shapes(24, seed=0, cube_at=cube_at)):
        loss = (model(shape, template) - template).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        shape, template = shapes(1, seed=1, cube_at=None)[0]
        print(f"final_loss={(model(shape, template) - template).abs().mean().item():.6f}")


if __name__ == "__main__":
    train(cube_at=0)
