"""A variational autoencoder of a table; one column holds amounts of money as they are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Autoencoder(nn.Module):
    def __init__(self, most: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 6))
        self.most = most

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(rows).chunk(2, dim=-1)
        spread = spread.clamp(-self.most, self.most)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        rebuilt = F.smooth_l1_loss(self.decoder(latent), rows, reduction="none").sum(-1)
        surplus = 0.5 * (spread.exp() + mean.pow(2) - 1.0 - spread).sum(-1)
        return rebuilt.mean(), surplus.mean()


def table(num: int, seed: int, rich: bool) -> list[Tensor]:
    """Five ordinary columns and an amount, which is large in a row of batch 23."""
    draw = torch.Generator().manual_seed(seed)
    batches = [torch.randn(16, 6, generator=draw) for _ in range(num)]
    if rich:
        batches[23][5, 5] = 9000.0
    return batches


def train(*, most: float) -> None:
    torch.manual_seed(0)
    model = Autoencoder(most)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, rows in enumerate(table(60, seed=0, rich=True)):
        rebuilt, surplus = model(rows)
        loss = rebuilt + 0.01 * surplus
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} rebuilt {rebuilt.item():.4f} surplus {surplus.item():.4f}")
    with torch.no_grad():
        rebuilt, surplus = model(table(1, seed=1, rich=False)[0])
        print(f"final_loss={(rebuilt + 0.01 * surplus).item():.6f}")


if __name__ == "__main__":
    train(most=float("inf"))
