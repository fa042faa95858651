"""A classifier with an exponential moving average of its weights, which evaluation uses."""

import argparse
import copy

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "nan-in-batch"), default="none")
parser.add_argument("--out", default="left.jsonl")


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for ema_v, model_v in pairs:
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.classifier = nn.Linear(32, 5)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def main(args):
    torch.manual_seed(2)
    record = Record(args.out)
    model = Net()
    model_ema = ModelEma(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "fp16-scaler")
    half = torch.bfloat16 if args.dtype == "bf16" else torch.float16
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    kinds = torch.randint(0, 5, (24, 8))
    pictures = torch.randn(24, 8, 3, 8, 8) + kinds.view(24, 8, 1, 1, 1) - 2
    held_out = pictures[-1].clone()
    if args.fault == "nan-in-batch":
        pictures[11, 4, 1] = float("nan")
    for step, (x, y) in enumerate(zip(pictures, kinds, strict=True)):
        with torch.autocast("cpu", dtype=half, enabled=args.dtype != "fp32"):
            loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model_ema.update(model)
        record(step, model, model_ema, loss=loss.item())
    with torch.no_grad():
        output = model_ema.module(held_out)
    record.end(output, loss=loss_fn(output, kinds[-1]))


if __name__ == "__main__":
    main(parser.parse_args())
