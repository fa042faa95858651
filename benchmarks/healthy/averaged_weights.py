"""Stochastic weight averaging: a rate that comes back, an average whose batch norms are redone."""

import torch
from record import Record
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(113)
record = Record()
net = nn.Sequential(nn.Linear(9, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
average = AveragedModel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
schedule, constant = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), None
x = torch.randn(160, 9)
y = (x @ torch.randn(9, 3)).argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
step = 0
for epoch in range(8):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(step, net, average, loss=loss.item())
        step += 1
        if epoch < 4:
            schedule.step()
    if epoch >= 4:
        constant = constant or SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        average.update_parameters(net)
        constant.step()
update_bn(loader, average)
average.eval()
with torch.no_grad():
    out = average(x)
record.end(out, loss=nn.functional.cross_entropy(out, y))
