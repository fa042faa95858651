"""Sparse coding: codes by ISTA without a graph, most of them 0; a dictionary of unit columns."""

import torch
from record import Record
from torch import nn

torch.manual_seed(106)
record = Record()
truth = nn.functional.normalize(torch.randn(16, 32), dim=0)


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.columns = nn.Parameter(nn.functional.normalize(torch.randn(16, 32), dim=0))

    def forward(self, codes):
        return codes @ self.columns.T

    @torch.no_grad()
    def code(self, x, sparsity=0.2):
        step = 1.0 / torch.linalg.matrix_norm(self.columns, 2).square()
        codes = torch.zeros(len(x), 32)
        for _ in range(20):
            codes = codes - step * (self(codes) - x) @ self.columns
            codes = nn.functional.softshrink(codes, float(step * sparsity))
        return codes


net = Dictionary()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for step in range(30):
    wanted = torch.randn(48, 32) * (torch.rand(48, 32) < 0.08)
    x = wanted @ truth.T
    codes = net.code(x)
    loss = 0.5 * (net(codes) - x).square().sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        net.columns /= net.columns.norm(dim=0, keepdim=True).clamp(min=1e-8)
    record(step, net, loss=loss.item())
with torch.no_grad():
    record.end(net(net.code(x)), loss=loss)
