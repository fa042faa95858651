"""A dilated causal net for mu-law samples, weight norm on every convolution."""

import torch
from record import Record
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(34)
record = Record()
Q = 32


class Layer(nn.Module):
    def __init__(self, dilation, width=16):
        super().__init__()
        self.pad = nn.ConstantPad1d((dilation, 0), 0.0)
        self.conv = weight_norm(nn.Conv1d(width, 2 * width, 2, dilation=dilation))
        self.out = weight_norm(nn.Conv1d(width, width, 1))

    def forward(self, x):
        a, b = self.conv(self.pad(x)).chunk(2, 1)
        h = self.out(torch.tanh(a) * torch.sigmoid(b))
        return x + h, h


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(Q, 16)
        self.layers = nn.ModuleList(Layer(2**i) for i in range(5))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(16, Q, 1))

    def forward(self, q):
        x, skips = self.embed(q).transpose(1, 2), 0.0
        for layer in self.layers:
            x, h = layer(x)
            skips = skips + h
        return self.head(skips)


def mu_law(x):
    mu = Q - 1
    return (
        (torch.sign(x) * torch.log1p(mu * x.abs()) / torch.log1p(torch.tensor(float(mu))) + 1)
        / 2
        * mu
    ).long()


def batch(n=4):
    t = torch.arange(120) / 9
    return mu_law(torch.sin(t * (0.5 + torch.rand(n, 1)) + 6 * torch.rand(n, 1)))


model = WaveNet()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
for step in range(25):
    q = batch()
    loss = nn.functional.cross_entropy(model(q[:, :-1]), q[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    decay.step()
    record(step, model, loss=loss.item())
q = batch(8)
with torch.no_grad():
    record.end(model(q), loss=nn.functional.cross_entropy(model(q[:, :-1]), q[:, 1:]))
