"""A discrete autoencoder: Gumbel-softmax, hard in the forward, its temperature annealed."""

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(27)
record = Record()
N, K = 4, 6
enc = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, N * K))
dec = nn.Sequential(nn.Linear(N * K, 64), nn.ReLU(), nn.Linear(64, 20))
optimizer = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=2e-3)
patterns = (torch.rand(6, 20) > 0.5).float()
for step in range(35):
    x = patterns[torch.randint(6, (48,))]
    temperature = max(0.5, 1.0 * 0.97**step)
    logits = enc(x).view(-1, N, K)
    z = F.gumbel_softmax(logits, tau=temperature, hard=True)
    out = dec(z.flatten(1))
    q = logits.softmax(-1)
    kl = (q * (q.clamp(min=1e-10) * K).log()).sum((1, 2)).mean()
    loss = F.binary_cross_entropy_with_logits(out, x, reduction="sum") / len(x) + 0.1 * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, enc, dec, loss=loss.item())
with torch.no_grad():
    z = F.one_hot(enc(patterns).view(-1, N, K).argmax(-1), K).float()
    out = dec(z.flatten(1))
record.end(out, loss=F.binary_cross_entropy_with_logits(out, patterns))
