"""VQ-VAE: gradients pass straight through the codebook, which moves by averages without them."""

import torch
from record import Record
from torch import nn

torch.manual_seed(26)
record = Record()


class Quantizer(nn.Module):
    def __init__(self, num=16, dim=4, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(num, dim))
        self.register_buffer("counts", torch.zeros(num))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(-1)
        chosen = self.codes[index]
        if self.training:
            hot = nn.functional.one_hot(index, len(self.codes)).float()
            with torch.no_grad():
                self.counts.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(hot.T @ z, alpha=1 - self.decay)
                total = self.counts.sum()
                smooth = (self.counts + 1e-5) / (total + 16e-5) * total
                self.codes.copy_(self.sums / smooth[:, None].clamp(min=1e-4))
        return z + (chosen - z).detach(), nn.functional.mse_loss(z, chosen.detach())


encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))
quantizer = Quantizer()
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3, amsgrad=True)
centres = torch.randn(8, 12)
for step in range(30):
    x = centres[torch.randint(8, (64,))] + 0.1 * torch.randn(64, 12)
    z, commitment = quantizer(encoder(x))
    loss = nn.functional.mse_loss(decoder(z), x) + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, encoder, decoder, quantizer, loss=loss.item())
quantizer.eval()
with torch.no_grad():
    out = decoder(quantizer(encoder(centres))[0])
record.end(out, loss=(out - centres).square().mean())
