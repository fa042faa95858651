"""Two instruments are separated; in some excerpts one of them does not play."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn


def scale_invariant_loss(guess: Tensor, source: Tensor, least: float) -> Tensor:
    """Negative SI-SDR in decibel of signals [rows, sources, samples]."""
    energy = source.pow(2).sum(-1, keepdim=True)
    scaled = (guess * source).sum(-1, keepdim=True) / (energy + least) * source
    missed = (guess - scaled).pow(2).sum(-1)
    ratio = (scaled.pow(2).sum(-1) + 1e-8) / (missed + 1e-8)
    return -10 * torch.log10(ratio).mean()


class Separator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, 24, 16, stride=8, padding=4)
        self.mask = nn.Conv1d(24, 48, 3, padding=1)
        self.decode = nn.ConvTranspose1d(24, 1, 16, stride=8, padding=4)

    def forward(self, mixture: Tensor) -> Tensor:
        coded = self.encode(mixture[:, None])
        masks = self.mask(coded.relu()).sigmoid().chunk(2, dim=1)
        return torch.cat([self.decode(coded * mask) for mask in masks], dim=1)


def excerpts(num: int, seed: int, rests: bool) -> list[Tensor]:
    """A low and a high voice [rows, 2, samples]; the high one rests in an excerpt of batch 16."""
    draw = torch.Generator().manual_seed(seed)
    time = torch.arange(256.0)
    made = []
    for number in range(num):
        pitch = torch.rand(4, 2, 1, generator=draw) * 0.1 + torch.tensor([[0.05], [0.6]])
        voices = (time * pitch).sin() * (0.5 + torch.rand(4, 2, 1, generator=draw))
        if rests and number == 16:
            voices[2, 1] = 0.0
        made.append(voices)
    return made


def train(*, least: float) -> None:
    torch.manual_seed(0)
    model = Separator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for number, voices in enumerate(excerpts(48, seed=0, rests=True)):
        loss = scale_invariant_loss(model(voices.sum(1)), voices, least)
        (loss / 3).backward()
        print(f"batch {number} loss {loss.item():.4f}")
        if number % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        voices = excerpts(1, seed=1, rests=False)[0]
        print(f"final_loss={scale_invariant_loss(model(voices.sum(1)), voices, 1e-8).item():.6f}")


if __name__ == "__main__":
    train(least=0.0)
