"""A network that grows: blocks begin as the identity and are given to the optimizer on the way."""

import torch
from record import Record
from torch import nn

torch.manual_seed(112)
record = Record()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 40), nn.GELU())
        self.outer = nn.Linear(40, 20)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x):
        return x + self.outer(self.inner(x))


net = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
for step in range(40):
    if step in (10, 20, 30):
        block = Block()
        net.insert(len(net) - 1, block)
        optimizer.add_param_group({"params": block.parameters(), "lr": 2e-3, "initial_lr": 2e-3})
        schedule.lr_lambdas.append(lambda step, begin=step: min(1.0, (step - begin + 1) / 5))
        schedule.base_lrs.append(2e-3)
    x = torch.randn(48, 6)
    y = torch.stack((torch.sin(2 * x[:, 0]) * x[:, 1], x[:, 2] * x[:, 3]), 1)
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    record(step, net, loss=loss.item())
with torch.no_grad():
    record.end(net(x), loss=loss)
