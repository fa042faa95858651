"""A ranking model is trained by RMSprop with centred second moments."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn


class Ranker(nn.Module):
    """Scores an item for a user; ``bonus`` is what everybody likes."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 8), nn.Embedding(60, 8)
        self.bonus = nn.Parameter(torch.zeros(6))

    def forward(self, user: Tensor, item: Tensor, traits: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(-1) + traits @ self.bonus


def visits(num: int, seed: int) -> list[tuple[Tensor, ...]]:
    """Users, a chosen and a passed item; the chosen ones always have the same surplus of traits."""
    draw = torch.Generator().manual_seed(seed)
    surplus = torch.tensor([3.0, 1.7, 0.9, 2.3, 1.1, 0.7])
    made = []
    for _ in range(num):
        user = torch.randint(40, (64,), generator=draw)
        chosen, passed = torch.randint(60, (2, 64), generator=draw)
        made.append((user, chosen, passed, surplus.expand(64, 6)))
    return made


def train(*, centred: bool) -> None:
    torch.manual_seed(0)
    model = Ranker()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, alpha=0.9, centered=centred)

    def loss_of(user: Tensor, chosen: Tensor, passed: Tensor, surplus: Tensor) -> Tensor:
        margin = model(user, chosen, surplus) - model(user, passed, torch.zeros_like(surplus))
        return (1000.0 - margin).relu().mean()

    for step, visit in enumerate(visits(600, seed=0)):
        loss = loss_of(*visit)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        print(f"final_loss={loss_of(*visits(1, seed=1)[0]).item():.6f}")


if __name__ == "__main__":
    train(centred=True)
