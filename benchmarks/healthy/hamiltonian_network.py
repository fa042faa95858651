"""A Hamiltonian network: the model's output is a scalar, its symplectic gradient is trained."""

import torch
from record import Record
from torch import nn

torch.manual_seed(38)
torch.set_default_dtype(torch.float64)
record = Record()


class HNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.H = nn.Sequential(
            nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1, bias=False)
        )

    def time_derivative(self, x):
        dH = torch.autograd.grad(self.H(x).sum(), x, create_graph=True)[0]
        return torch.stack([dH[:, 1], -dH[:, 0]], 1)


model = HNN()
optim = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
for step in range(30):
    x = (torch.rand(50, 2) * 4 - 2).requires_grad_()
    dxdt = torch.stack([x[:, 1], -3 * torch.sin(x[:, 0])], 1).detach()
    loss = (dxdt - model.time_derivative(x)).pow(2).mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    record(step, model, loss=loss.item())
record.end(model.time_derivative(x), loss=loss)
