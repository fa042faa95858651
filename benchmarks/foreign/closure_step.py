"""optimizer.step(closure) of optimizers that need no closure:
SGD, Adam, Rprop and ASGD one after another on one model.
"""

import argparse

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "zero-norm"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()
torch.manual_seed(60)
record = Record(args.out)
model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.1), nn.GELU(), nn.Linear(20, 3))
makers = (
    lambda p: torch.optim.SGD(p, lr=0.05),
    lambda p: torch.optim.Adam(p, lr=5e-3),
    lambda p: torch.optim.Rprop(p, lr=1e-3),
    lambda p: torch.optim.ASGD(p, lr=0.01),
)
x = torch.randn(32, 6)
target = nn.functional.normalize(x[:, :3] * 2, dim=1)


def distance(output):
    return (output / output.norm(dim=1, keepdim=True) - target).square().sum(1).mean()


step = 0
for make in makers:
    optimizer = make(model.parameters())
    for turn in range(7):

        def closure():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
                output = model(x)
            if args.fault == "zero-norm" and step == 10:
                output = output * (torch.arange(32) != 4).unsqueeze(1)
            loss = distance(output.float())
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        record(step, model, loss=loss.item())
        step += 1
model.eval()
with torch.no_grad():
    output = model(x)
    record.end(output, loss=distance(output))
