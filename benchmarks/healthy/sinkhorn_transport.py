"""Points are moved onto others by an entropic transport loss, in the log domain; no network."""

import torch
from record import Record
from torch import nn

torch.manual_seed(94)
record = Record()


class Cloud(nn.Module):
    def __init__(self, n=40):
        super().__init__()
        self.at = nn.Parameter(torch.randn(n, 2) * 0.3)


def sinkhorn(x, y, epsilon=0.1, iterations=20):
    cost = torch.cdist(x, y).square()
    f, g = torch.zeros(len(x)), torch.zeros(len(y))
    log_n = torch.log(torch.tensor(float(len(x))))
    for _ in range(iterations):
        f = -epsilon * torch.logsumexp((g - cost) / epsilon - log_n, dim=1)
        g = -epsilon * torch.logsumexp((f[:, None] - cost) / epsilon - log_n, dim=0)
    plan = ((f[:, None] + g - cost) / epsilon - 2 * log_n).exp()
    return (plan * cost).sum()


cloud = Cloud()
angle = torch.linspace(0, 6.2832, 41)[:-1]
goal = torch.stack([angle.cos(), angle.sin()], 1)
optimizer = torch.optim.SGD(cloud.parameters(), lr=4.0)
for step in range(30):
    loss = sinkhorn(cloud.at, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, cloud, loss=loss.item())
record.end(cloud.at, loss=loss)
