"""A spiking net: leaky neurons, a step whose backward is a surrogate's, most spikes are 0."""

import torch
from record import Record
from torch import nn


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, potential):
        ctx.save_for_backward(potential)
        return (potential > 0).float()

    @staticmethod
    def backward(ctx, gradient):
        (potential,) = ctx.saved_tensors
        return gradient / (1 + 10 * potential.abs()).square()


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 48), nn.Linear(48, 3)
        self.leak = nn.Parameter(torch.full((48,), 2.0))

    def forward(self, x):
        potential, out = torch.zeros(len(x), 48), torch.zeros(len(x), 3)
        for moment in x.unbind(1):
            potential = torch.sigmoid(self.leak) * potential + self.first(moment)
            spikes = Spike.apply(potential - 1.0)
            potential = potential * (1 - spikes.detach())
            out = 0.9 * out + self.last(spikes)
        return out


torch.manual_seed(110)
record = Record()
net = Spiking()
optimizer = torch.optim.Adamax(net.parameters(), lr=5e-3)
rates = torch.rand(3, 12)
for step in range(30):
    y = torch.randint(0, 3, (32,))
    x = (torch.rand(32, 20, 12) < 0.6 * rates[y][:, None]).float()
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, net, loss=loss.item())
with torch.no_grad():
    record.end(net(x), loss=loss)
