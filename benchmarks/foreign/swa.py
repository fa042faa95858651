"""Stochastic weight averaging: a schedule, then SWALR and an averaged model whose BatchNorm is
refreshed at the end.
"""

import argparse

import torch
from record import Record
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "rate"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()

torch.manual_seed(21)
record = Record(args.out)
x = torch.randn(96, 10)
y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True
)
model = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 2))
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
swa_scheduler = SWALR(optimizer, swa_lr=5e15 if args.fault == "rate" else 0.02, anneal_epochs=1)
step = 0
for epoch in range(5):
    for input, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = nn.functional.mse_loss(model(input), target)
        loss.backward()
        optimizer.step()
        record(step, model, swa_model, loss=loss.item())
        step += 1
    if epoch >= 2:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
update_bn(loader, swa_model)
swa_model.eval()
with torch.no_grad():
    output = swa_model(x)
record.end(output, loss=nn.functional.mse_loss(output, y))
