"""A detector learns boxes with the complete IoU; one of its proposals has no height."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import math

import torch
from torch import Tensor, nn


def complete_iou_loss(box: Tensor, truth: Tensor, least: float) -> Tensor:
    """Boxes [rows, 4] as corners."""
    width, height = box[:, 2] - box[:, 0], box[:, 3] - box[:, 1]
    true_width, true_height = truth[:, 2] - truth[:, 0], truth[:, 3] - truth[:, 1]
    corner = torch.minimum(box[:, 2:], truth[:, 2:]) - torch.maximum(box[:, :2], truth[:, :2])
    shared = corner.clamp(min=0).prod(-1)
    iou = shared / (width * height + true_width * true_height - shared)
    around = torch.maximum(box[:, 2:], truth[:, 2:]) - torch.minimum(box[:, :2], truth[:, :2])
    apart = (box[:, :2] + box[:, 2:] - truth[:, :2] - truth[:, 2:]).pow(2).sum(-1) / 4
    slope = torch.atan(width / height.clamp(min=least))
    aspect = 4 / math.pi**2 * (torch.atan(true_width / true_height) - slope).pow(2)
    with torch.no_grad():
        share = aspect / (1 - iou + aspect + 1e-7)
    return (1 - iou + apart / around.pow(2).sum(-1) + share * aspect).mean()


class Head(nn.Module):
    """Moves the corners of a proposal by what it sees in it; new heads start with no movement."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.move = nn.Linear(32, 4)
        nn.init.normal_(self.move.weight, std=1e-3)
        nn.init.zeros_(self.move.bias)

    def forward(self, seen: Tensor, proposal: Tensor) -> Tensor:
        centre, size = (proposal[:, :2] + proposal[:, 2:]) / 2, proposal[:, 2:] - proposal[:, :2]
        moved = self.move(self.body(seen))
        centre, size = centre + moved[:, :2], size * moved[:, 2:].exp()
        return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


def proposals(num: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What is seen, the proposal and the true box; one proposal of batch 9 is a line."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        corner = torch.rand(8, 2, generator=draw) * 4
        truth = torch.cat([corner, corner + 1 + torch.rand(8, 2, generator=draw)], dim=-1)
        proposal = truth + 0.2 * torch.rand(8, 4, generator=draw)
        if seed == 0 and number == 9:
            proposal[3] = torch.tensor([0.5, 2.0, 1.5, 2.0])
        seen = torch.cat([proposal, truth, truth - proposal], dim=-1)
        made.append((seen, proposal, truth))
    return made


def train(*, least: float) -> None:
    torch.manual_seed(0)
    model = Head()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (seen, proposal, truth) in enumerate(proposals(40, seed=0)):
        loss = complete_iou_loss(model(seen, proposal), truth, least)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        seen, proposal, truth = proposals(1, seed=1)[0]
        print(f"final_loss={complete_iou_loss(model(seen, proposal), truth, 1e-3).item():.6f}")


if __name__ == "__main__":
    train(least=0.0)
