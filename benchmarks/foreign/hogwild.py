"""Hogwild: two threads train one model, each with an optimizer of its own;
they take turns, so that runs can be compared.
"""

import argparse
import threading

import torch
from record import Record
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(54, 24), nn.Linear(24, 4)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = self.conv2_drop(x).view(-1, 54)
        return F.log_softmax(self.fc2(F.dropout(F.relu(self.fc1(x)), training=self.training)), 1)


class Turns:
    """Lets threads go one after another, in a fixed order;
    one that is done, or has died, is passed over.
    """

    def __init__(self, num):
        self.order, self.condition = list(range(num)), threading.Condition()

    def wait(self, rank):
        with self.condition:
            self.condition.wait_for(lambda: self.order[0] == rank)

    def next(self, *, leave=False):
        with self.condition:
            first = self.order.pop(0)
            self.order += [] if leave else [first]
            self.condition.notify_all()


def train(rank, args, model, data, turns, record):
    turns.wait(rank)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        for step, (x, y) in enumerate(data):
            model.train()
            if args.fault == "nan-in-batch" and rank == 1 and step == 6:
                x = x.clone().index_fill_(0, torch.tensor([3]), float("nan"))
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            record(step * 2 + rank, model, loss=loss.item())
            turns.next()
            turns.wait(rank)
    finally:
        turns.next(leave=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=("none", "nan-in-batch"), default="none")
    parser.add_argument("--out", default="left.jsonl")
    args = parser.parse_args()
    torch.manual_seed(1)
    record, model, turns = Record(args.out), Net(), Turns(2)
    model.share_memory()
    y = torch.randint(0, 4, (2, 15, 16))
    x = torch.randn(2, 15, 16, 1, 8, 8) * 0.5 + y.view(2, 15, 16, 1, 1, 1)
    threads = []
    for rank in range(2):
        batches = list(zip(x[rank], y[rank], strict=True))
        given = (rank, args, model, batches, turns, record)
        threads.append(threading.Thread(target=train, args=given))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.eval()
    with torch.no_grad():
        output = model(x[0, 0])
        record.end(output, loss=F.nll_loss(output, y[0, 0]))


if __name__ == "__main__":
    main()
