"""MAML: an inner step of each task with a graph, through functional_call and autograd.grad;
the outer loss of all tasks.
"""

import argparse

import torch
from record import Record
from torch import nn
from torch.func import functional_call

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--fault", choices=("none", "inner-rate"), default="none")
parser.add_argument("--out", default="left.jsonl")


def sine_task(shots=8):
    amplitude, phase = torch.rand(1) * 4 + 0.5, torch.rand(1) * 3
    x = torch.rand(2 * shots, 1) * 8 - 4
    y = amplitude * torch.sin(x + phase)
    return x[:shots], y[:shots], x[shots:], y[shots:]


def adapt(model, params, x, y, lr):
    loss = nn.functional.mse_loss(functional_call(model, params, (x,)), y)
    grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
    return {name: p - lr * g for (name, p), g in zip(params.items(), grads, strict=True)}


def main():
    args = parser.parse_args()
    torch.manual_seed(17)
    record = Record(args.out)
    model = nn.Sequential(
        nn.Linear(1, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1)
    )
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(20):
        inner_lr = 1e13 if args.fault == "inner-rate" and step >= 10 else 0.01
        meta_loss = 0.0
        for _ in range(3):
            x, y, x_query, y_query = sine_task()
            params = adapt(model, dict(model.named_parameters()), x, y, inner_lr)
            params = adapt(model, params, x, y, inner_lr)
            prediction = functional_call(model, params, (x_query,))
            meta_loss = meta_loss + nn.functional.mse_loss(prediction, y_query)
        meta_optimizer.zero_grad()
        (meta_loss / 3).backward()
        meta_optimizer.step()
        record(step, model, loss=meta_loss.item() / 3)
    torch.manual_seed(18)
    x, y, x_query, y_query = sine_task()
    params = adapt(model, dict(model.named_parameters()), x, y, 0.01)
    output = functional_call(model, params, (x_query,))
    record.end(output, loss=nn.functional.mse_loss(output, y_query))


if __name__ == "__main__":
    main()
