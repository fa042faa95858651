"""Noise on the weights: added before the forward, taken off before the update;
gradients get noise, too.
"""

import argparse

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "square-overflows"), default="none")
parser.add_argument("--out", default="left.jsonl")


def perturb(model, std):
    noise = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise[name] = torch.randn_like(p) * std
            p.add_(noise[name])
    return noise


def restore(model, noise):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(noise[name])


def main():
    args = parser.parse_args()
    torch.manual_seed(70)
    record = Record(args.out)
    model = nn.Sequential(
        nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1)
    )
    for p in model.parameters():
        p.register_hook(lambda grad: grad + torch.randn_like(grad) * 1e-4)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    half = torch.bfloat16 if args.dtype == "bf16" else torch.float16
    scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "fp16-scaler")
    data = torch.randn(25, 16, 9)
    target = data.square().mean(-1, keepdim=True)
    overflows = args.fault == "square-overflows"
    for step, (x, y) in enumerate(zip(data, target, strict=True)):
        if overflows and step == 11:
            x = x * 1e22  # a unit that was not converted
        noise = perturb(model, 0.01)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=half, enabled=args.dtype != "fp32"):
            output = model(x)
            loss = (output - y).pow(2).mean()
        scaler.scale(loss).backward()
        restore(model, noise)
        scaler.step(optimizer)
        scaler.update()
        record(step, model, loss=loss.item())
    with torch.no_grad():
        output = model(data[0])
        record.end(output, loss=(output - target[0]).pow(2).mean())


if __name__ == "__main__":
    main()
