"""Sine waves foretold by LSTM cells in double precision, trained with LBFGS on the whole set."""

import argparse

import torch
from record import Record
from torch import nn, optim

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--fault", choices=("none", "nan-in-batch", "rate"), default="none")
parser.add_argument("--out", default="left.jsonl")


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 9)
        self.lstm2 = nn.LSTMCell(9, 9)
        self.linear = nn.Linear(9, 1)

    def forward(self, input, future=0):
        outputs = []
        h, c = (torch.zeros(input.size(0), 9, dtype=torch.double) for _ in range(2))
        h2, c2 = (torch.zeros(input.size(0), 9, dtype=torch.double) for _ in range(2))
        for input_t in input.split(1, dim=1):
            h, c = self.lstm1(input_t, (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            outputs += [self.linear(h2)]
        for _ in range(future):
            h, c = self.lstm1(outputs[-1], (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            outputs += [self.linear(h2)]
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    opt = parser.parse_args()
    torch.manual_seed(0)
    record = Record(opt.out)
    phase = torch.randint(-20, 20, (12, 1)).double()
    data = torch.sin((torch.arange(14).double() + phase) / 3)
    input, target = data[3:, :-1], data[3:, 1:]
    test_input, test_target = data[:3, :-1], data[:3, 1:]
    seq, criterion = Sequence(), nn.MSELoss()
    seq.double()
    optimizer = optim.LBFGS(seq.parameters(), lr=1e6 if opt.fault == "rate" else 0.5, max_iter=6)
    for i in range(12):
        if opt.fault == "nan-in-batch" and i == 6:
            input = input.clone()
            input[2, 4] = float("nan")

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        record(i, seq, loss=loss.item())
        with torch.no_grad():
            pred = seq(test_input, future=5)
            test_loss = criterion(pred[:, :-5], test_target)
            print("test loss:", round(test_loss.item(), 6))
    record.end(pred, loss=test_loss)
