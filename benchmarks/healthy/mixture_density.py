"""A mixture density net: a logarithm of a sum of densities, rows with missing targets left out."""

import torch
from record import Record
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(114)
record = Record()


class Measured(Dataset):
    """Pairs of which some were never measured: their target is NaN."""

    def __init__(self):
        self.y = torch.rand(320) * 2 - 1
        self.x = self.y + 0.3 * torch.sin(6 * self.y) + 0.05 * torch.randn(320)
        self.y[torch.rand(320) < 0.2] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return self.x[row : row + 1], self.y[row : row + 1]


net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 15))
optimizer = torch.optim.NAdam(net.parameters(), lr=5e-3)


def loss_of(x, y):
    seen = ~y.isnan().squeeze(1)
    shares, means, widths = net(x[seen]).chunk(3, 1)
    densities = torch.distributions.Normal(means, nn.functional.softplus(widths) + 1e-3)
    logs = shares.log_softmax(1) + densities.log_prob(y[seen])
    return -logs.logsumexp(1).mean()


step = 0
for _ in range(4):
    for x, y in DataLoader(Measured(), batch_size=32, shuffle=True):
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(step, net, loss=loss.item())
        step += 1
with torch.no_grad():
    record.end(net(torch.linspace(-1, 1, 9)[:, None]), loss=loss)
