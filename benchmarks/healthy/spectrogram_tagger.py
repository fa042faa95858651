"""Audio tagging: log-mel-like bands of an STFT, rare tags, focal loss; silence in some clips."""

import torch
from record import Record
from torch import nn

torch.manual_seed(33)
record = Record()
RATE, TAGS = 2000, 3


def clips(n):
    t = torch.arange(RATE // 2) / RATE
    y = (torch.rand(n, TAGS) < 0.25).float()
    tones = torch.stack([torch.sin(6.2832 * f * t) for f in (110.0, 330.0, 700.0)])
    return y @ tones, y  # a clip without a tag is silent


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(128))
        self.net = nn.Sequential(
            nn.Conv1d(65, 24, 3, padding=1), nn.ReLU(), nn.Conv1d(24, 24, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(24, TAGS)

    def forward(self, x):
        s = torch.stft(x, 128, 64, window=self.window, return_complex=True)
        return self.head(self.net(torch.log(s.abs().square() + 1e-6)).mean(-1))


def focal(logits, y, gamma=2.0):
    bce = nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="none")
    p = torch.exp(-bce)
    return ((1 - p) ** gamma * bce).mean()


model = Tagger()
optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
for step in range(25):
    x, y = clips(12)
    loss = focal(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
x, y = clips(24)
with torch.no_grad():
    record.end(model(x), loss=focal(model(x), y))
