"""An importance-weighted autoencoder: a logarithm of a mean of ratios, and the doubly
reparameterised gradient by a hook.
"""

import math

import torch
from record import Record
from torch import distributions, nn

torch.manual_seed(111)
record = Record()
SAMPLES = 8
encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))
modules = nn.ModuleList((encoder, decoder))
optimizer = torch.optim.Adam(modules.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-4)
prior = distributions.Normal(torch.zeros(4), torch.ones(4))
shapes = (torch.rand(5, 16) < 0.5).float()


def bound(x):
    mean, log_width = encoder(x).chunk(2, 1)
    width = log_width.clamp(-7, 7).exp()
    z = distributions.Normal(mean, width).rsample((SAMPLES,))
    proposed = distributions.Normal(mean.detach(), width.detach())
    seen = distributions.Bernoulli(logits=decoder(z))
    log_ratio = prior.log_prob(z).sum(-1) + seen.log_prob(x).sum(-1)
    log_ratio = log_ratio - proposed.log_prob(z).sum(-1)
    weight = log_ratio.detach().softmax(0)
    if z.requires_grad:
        z.register_hook(lambda gradient: weight[..., None] * gradient)
    return (weight * log_ratio).sum(0).mean(), (log_ratio.logsumexp(0) - math.log(SAMPLES)).mean()


for step in range(40):
    x = shapes[torch.randint(0, 5, (24,))]
    x = torch.where(torch.rand(24, 16) < 0.05, 1 - x, x)
    surrogate, value = bound(x)
    optimizer.zero_grad()
    (-surrogate).backward()
    optimizer.step()
    record(step, modules, loss=-value.item())
with torch.no_grad():
    _, value = bound(shapes)
record.end(value, loss=-value)
