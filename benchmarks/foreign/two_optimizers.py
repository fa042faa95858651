"""An encoder and a head under an optimizer each:
every order of their backwards, updates and emptied gradients in turn.
"""

import argparse

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "nan-in-batch"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()
torch.manual_seed(50)
record = Record(args.out)
encoder = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh())
head, decoder = nn.Linear(24, 2), nn.Linear(24, 8)
first = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
second = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
half = torch.bfloat16 if args.dtype == "bf16" else torch.float16
scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "fp16-scaler")


def losses(x, y):
    with torch.autocast("cpu", dtype=half, enabled=args.dtype != "fp32"):
        z = encoder(x)
        return nn.functional.mse_loss(decoder(z), x), nn.functional.cross_entropy(head(z), y)


def both_then_steps(x, y, order):
    rebuilt, told = losses(x, y)
    for optimizer in order:
        optimizer.zero_grad()
    scaler.scale(rebuilt).backward(retain_graph=True)
    scaler.scale(told).backward()
    for optimizer in order:
        scaler.step(optimizer)
    return rebuilt, told


def one_loss(x, y, order):
    rebuilt, told = losses(x, y)
    scaler.scale(rebuilt + told).backward()
    for optimizer in order:
        scaler.step(optimizer)
        optimizer.zero_grad()
    return rebuilt, told


def one_after_another(x, y, order):
    for optimizer in order:
        encoder.zero_grad()
        optimizer.zero_grad()
        rebuilt, told = losses(x, y)
        scaler.scale(rebuilt if optimizer is first else told).backward()
        scaler.step(optimizer)
    return rebuilt, told


def alternating(x, y, order):
    rebuilt, told = losses(x, y)
    scaler.scale(rebuilt + told).backward()
    scaler.step(order[0])
    first.zero_grad()
    second.zero_grad(set_to_none=False)
    return rebuilt, told


def frozen_head(x, y, order):
    head.requires_grad_(False)
    first.zero_grad()
    rebuilt, told = losses(x, y)
    scaler.scale(rebuilt + told).backward()
    scaler.step(first)
    head.requires_grad_(True)
    second.zero_grad()
    scaler.scale(nn.functional.cross_entropy(head(encoder(x).detach()), y)).backward()
    scaler.step(second)
    return rebuilt, told


step = 0
kinds = (both_then_steps, one_loss, one_after_another, alternating, frozen_head)
for train in kinds:
    for order in ((first, second), (second, first)):
        for _ in range(3):
            y = torch.randint(0, 2, (12,))
            x = torch.randn(12, 8) + y.unsqueeze(1)
            if args.fault == "nan-in-batch" and step % 6 == 4:
                x[5, 2] = float("nan")
            rebuilt, told = train(x, y, order)
            scaler.update()
            record(step, encoder, decoder, head, loss=rebuilt.item() + told.item())
            step += 1
encoder.eval()
torch.manual_seed(51)
x = torch.randn(12, 8)
rebuilt, told = losses(x, torch.zeros(12, dtype=torch.long))
record.end(rebuilt, told, loss=(rebuilt + told).detach())
