"""A vector-quantised autoencoder; its codebook is the running mean of what chose each entry."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ENTRIES, WIDTH, DECAY = 16, 4, 0.99


class Quantiser(nn.Module):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.randn(ENTRIES, WIDTH))
        self.register_buffer("count", torch.zeros(ENTRIES))
        self.register_buffer("total", torch.zeros(ENTRIES, WIDTH))
        self.smoothing = smoothing

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(latent, self.codebook).argmin(-1)
        quantised = self.codebook[chosen]
        if self.training:
            self.learn(latent.detach(), F.one_hot(chosen, ENTRIES).float())
        away = F.mse_loss(latent, quantised)
        return latent + (quantised - latent).detach(), away

    def learn(self, latent: Tensor, choice: Tensor) -> None:
        self.count.mul_(DECAY).add_(choice.sum(0), alpha=1 - DECAY)
        self.total.mul_(DECAY).add_(choice.T @ latent, alpha=1 - DECAY)
        every = self.count.sum()
        smooth = (self.count + self.smoothing) / (every + ENTRIES * self.smoothing) * every
        self.codebook = self.total / smooth[:, None]


class Autoencoder(nn.Module):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.quantise = Quantiser(smoothing)
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, rows: Tensor) -> Tensor:
        quantised, away = self.quantise(self.encoder(rows))
        return F.mse_loss(self.decoder(quantised), rows) + 0.25 * away


def train(*, smoothing: float) -> None:
    torch.manual_seed(0)
    model = Autoencoder(smoothing)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    centres = torch.randn(8, 12)
    for step in range(60):
        rows = centres[torch.randint(8, (32,))] + 0.1 * torch.randn(32, 12)
        loss = model(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={model(centres).item():.6f}")


if __name__ == "__main__":
    train(smoothing=0.0)
