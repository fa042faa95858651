"""A forecast of several series:
each window divided by its own deviation, an LSTM, early stopping on a held-out part.
"""

import argparse
import copy

import torch
from record import Record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1]).squeeze(-1)


def windows(series, length=12):
    parts = series.unfold(0, length + 1, 1)
    mean, deviation = (
        parts[:, :length].mean(1, keepdim=True),
        parts[:, :length].std(1, keepdim=True),
    )
    parts = (parts - mean) / deviation
    return parts[:, :length].unsqueeze(-1), parts[:, length]


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--fault", choices=("none", "flat-window"), default="none")
    parser.add_argument("--out", default="left.jsonl")
    args = parser.parse_args()
    torch.manual_seed(7)
    record = Record(args.out)
    series = torch.sin(torch.arange(220) / 4.0) * 3 + torch.randn(220) * 0.2 + 20
    held_out = windows(series[160:])
    if args.fault == "flat-window":
        series[100:114] = 21.0  # the sensor hung
    loader = DataLoader(TensorDataset(*windows(series[:160])), batch_size=16, shuffle=True)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    best, best_state, step = float("inf"), None, 0
    for _ in range(3):
        model.train()
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
                loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            record(step, model, loss=loss.item())
            step += 1
        loss = evaluate(model, *held_out)
        scheduler.step(loss)
        if loss < best:
            best, best_state = loss.item(), copy.deepcopy(model.state_dict())
    if best_state is not None:
        model.load_state_dict(best_state)
    record.end(model(held_out[0]), loss=evaluate(model, *held_out))


if __name__ == "__main__":
    main()
