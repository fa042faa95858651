"""A diffusion model learns v-prediction with Min-SNR weights; its schedule ends in pure noise."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn

TIMES, GAMMA = 100, 5.0


def schedule() -> Tensor:
    """Return the cumulative alphas, rescaled so that the last signal-to-noise ratio is 0."""
    root = torch.cumprod(1 - torch.linspace(1e-3, 0.1, TIMES), 0).sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])).pow(2)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.when = nn.Embedding(TIMES, 32)
        self.enter, self.leave = nn.Linear(2, 64), nn.Linear(64, 2)
        self.middle = nn.Sequential(nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.shift = nn.Linear(32, 64)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        return self.leave(self.middle(self.enter(noisy) + self.shift(self.when(time))))


def loss_of(model: nn.Module, alphas: Tensor, draw: torch.Generator, *, in_two: bool) -> Tensor:
    clean = torch.randn(16, 2, generator=draw).sign() + 0.1 * torch.randn(16, 2, generator=draw)
    noise = torch.randn(16, 2, generator=draw)
    time = torch.randint(TIMES, (16,), generator=draw)
    alpha = alphas[time][:, None]
    noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
    missed = (model(noisy, time) - velocity).pow(2).mean(-1)
    snr = (alpha / (1 - alpha))[:, 0]
    if in_two:
        weight = snr.clamp(max=GAMMA) / snr
        weight = weight * snr / (snr + 1)
    else:
        weight = snr.clamp(max=GAMMA) / (snr + 1)
    return (weight * missed).mean()


def train(*, in_two: bool) -> None:
    torch.manual_seed(0)
    model, alphas = Denoiser(), schedule()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(3)
    for step in range(60):
        loss = loss_of(model, alphas, draw, in_two=in_two)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        final = loss_of(model, alphas, torch.Generator().manual_seed(9), in_two=False)
    print(f"final_loss={final.item():.6f}")


if __name__ == "__main__":
    train(in_two=True)
