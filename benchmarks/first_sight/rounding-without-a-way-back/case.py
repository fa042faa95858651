"""A compression network rounds its code; rounding has a derivative of 0."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Compressor(nn.Module):
    def __init__(self, straight: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
        self.straight = straight

    def forward(self, picture: Tensor) -> Tensor:
        code = self.encoder(picture) * 4.0
        coarse = torch.round(code)
        if self.straight:
            coarse = code + (coarse - code).detach()
        return self.decoder(coarse / 4.0)


def pictures(num: int, seed: int) -> Tensor:
    """Four hidden causes make sixteen pixels."""
    causes = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
    return causes @ torch.randn(4, 16, generator=torch.Generator().manual_seed(99))


def train(*, straight: bool) -> None:
    torch.manual_seed(0)
    model = Compressor(straight)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        batch = pictures(64, seed=step)
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        batch = pictures(64, seed=1000)
        print(f"final_loss={F.mse_loss(model(batch), batch).item():.6f}")


if __name__ == "__main__":
    train(straight=False)
