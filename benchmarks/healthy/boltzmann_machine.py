"""A restricted Boltzmann machine by contrastive divergence: gradients by formula, no autograd."""

import torch
from record import Record
from torch import nn

torch.manual_seed(88)
torch.set_grad_enabled(False)
record = Record()


class RBM(nn.Module):
    def __init__(self, visible=20, hidden=10):
        super().__init__()
        self.w = nn.Parameter(torch.randn(visible, hidden) * 0.1)
        self.v, self.h = nn.Parameter(torch.zeros(visible)), nn.Parameter(torch.zeros(hidden))

    def up(self, v):
        return torch.sigmoid(v @ self.w + self.h)

    def down(self, h):
        return torch.sigmoid(h @ self.w.T + self.v)


rbm = RBM()
optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1, momentum=0.5, weight_decay=1e-4)
patterns = (torch.rand(4, 20) > 0.5).float()
for step in range(50):
    v0 = patterns[torch.randint(4, (32,))]
    h0 = rbm.up(v0)
    v1 = rbm.down(torch.bernoulli(h0))
    h1 = rbm.up(v1)
    rbm.w.grad = -(v0.T @ h0 - v1.T @ h1) / 32
    rbm.v.grad, rbm.h.grad = -(v0 - v1).mean(0), -(h0 - h1).mean(0)
    optimizer.step()
    record(step, rbm, loss=(v0 - v1).square().mean().item())
record.end(rbm.down(rbm.up(patterns)), loss=(rbm.down(rbm.up(patterns)) - patterns).square().mean())
