"""Detection: a model that returns a dictionary of losses in training and boxes in evaluation;
the losses are added.
"""

import argparse
import math
import sys

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "empty-box", "picture-without-box"), default="none")
parser.add_argument("--out", default="left.jsonl")


def iou(a, b):
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inter = (high - low).clamp(min=0).prod(1)
    areas = [(c[:, 2:] - c[:, :2]).clamp(min=0).prod(1) for c in (a, b)]
    return inter / (areas[0] + areas[1] - inter)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.score, self.box = nn.Linear(8 * 16, 3), nn.Linear(8 * 16, 4)

    def forward(self, images, targets=None):
        x = self.backbone(torch.stack(images)).flatten(1)
        scores, boxes = self.score(x), self.box(x).float()
        center, size = boxes[:, :2].sigmoid(), nn.functional.softplus(boxes[:, 2:])
        if targets is not None and targets[0]["broken"]:
            size = size * 0
        boxes = torch.cat([center - size / 2, center + size / 2], 1)
        if targets is None:
            return scores, boxes
        wanted = torch.stack([t["boxes"] for t in targets])
        labels = torch.stack([t["labels"] for t in targets])
        has_box = labels > 0
        smooth = nn.functional.smooth_l1_loss(boxes, wanted, reduction="none").sum(1)
        return {
            "loss_classifier": nn.functional.cross_entropy(scores.float(), labels),
            "loss_box_reg": smooth[has_box].mean(),
            "loss_iou": (1 - iou(boxes, wanted))[has_box].mean(),
        }


def batch_of(step, fault):
    labels = torch.randint(1, 3, (6,))
    corner = torch.rand(6, 2) * 0.5
    boxes = torch.cat([corner, corner + 0.3], 1)
    if fault == "picture-without-box" and step == 8:
        labels = labels * 0
    broken = fault == "empty-box" and step == 8
    boxes = boxes * 0 if broken else boxes
    images = [torch.randn(1, 8, 8) * 0.2 + kind for kind in labels]
    keys = ("boxes", "labels", "broken")
    return images, [
        dict(zip(keys, (b, n, broken), strict=True)) for b, n in zip(boxes, labels, strict=True)
    ]


def train_one_epoch(model, optimizer, scaler, args, record):
    half = torch.bfloat16 if args.dtype == "bf16" else torch.float16
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=10)
    for step in range(20):
        images, targets = batch_of(step, args.fault)
        with torch.autocast("cpu", dtype=half, enabled=args.dtype != "fp32"):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()
            optimizer.step()
        warmup.step()
        record(step, model, loss=loss_value)


def main(args):
    torch.manual_seed(40)
    record, model = Record(args.out), Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cpu") if args.dtype == "fp16-scaler" else None
    train_one_epoch(model, optimizer, scaler, args, record)
    images, targets = batch_of(0, "none")
    with torch.no_grad():
        loss = sum(model(images, targets).values())
        record.end(*model.eval()(images), loss=loss)


if __name__ == "__main__":
    main(parser.parse_args())
