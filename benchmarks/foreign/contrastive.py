"""SimCLR: two views of each picture in one batch, cosines of all pairs, itself masked out."""

import argparse

import torch
from record import Record
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "exp-of-large"), default="none")
parser.add_argument("--out", default="left.jsonl")


class SimCLR:
    def __init__(self, args, model, optimizer, scheduler):
        self.args, self.model = args, model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.criterion = nn.CrossEntropyLoss()

    def info_nce_loss(self, features, temperature=0.5):
        labels = torch.cat([torch.arange(8) for _ in range(2)])
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = F.normalize(features, dim=1)
        similarity = features @ features.T
        mask = torch.eye(16, dtype=torch.bool)
        labels = labels[~mask].view(16, -1)
        similarity = similarity[~mask].view(16, -1)
        positives = similarity[labels.bool()].view(16, -1)
        negatives = similarity[~labels.bool()].view(16, -1)
        logits = torch.cat([positives, negatives], dim=1) / temperature
        return logits, torch.zeros(16, dtype=torch.long)

    def train(self, pictures, record):
        half = torch.bfloat16 if self.args.dtype == "bf16" else torch.float16
        scaler = torch.amp.GradScaler("cpu", enabled=self.args.dtype == "fp16-scaler")
        for step, batch in enumerate(pictures):
            views = torch.cat([batch + torch.randn_like(batch) * 0.3 for _ in range(2)])
            with torch.autocast("cpu", dtype=half, enabled=self.args.dtype != "fp32"):
                logits, labels = self.info_nce_loss(self.model(views))
                if self.args.fault == "exp-of-large" and step >= 10:
                    logits, labels = self.info_nce_loss(self.model(views), temperature=5e-3)
                    e = logits.exp()  # softmax by hand, the maximum not taken off
                    loss = -torch.log(e[:, 0] / e.sum(1)).mean()
                else:
                    loss = self.criterion(logits, labels)
            self.optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            record(step, self.model, loss=loss.item())
            if step >= 10:
                self.scheduler.step()


def main():
    args = parser.parse_args()
    torch.manual_seed(10)
    record = Record(args.out)
    backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    model = nn.Sequential(backbone, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    pictures = torch.randn(22, 8, 1, 8, 8).cumsum(-1)
    simclr = SimCLR(args, model, optimizer, scheduler)
    simclr.train(pictures, record)
    with torch.no_grad():
        features = model(torch.cat([pictures[0], pictures[0] + 0.1]))
        logits, labels = simclr.info_nce_loss(features)
        record.end(features, loss=simclr.criterion(logits, labels))


if __name__ == "__main__":
    main()
