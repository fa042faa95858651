"""bfloat16 weights with float32 masters:
the gradients of 64 micro-batches are still added up in bfloat16.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import finish, llama, token_batches

WINDOW = 64


def train(*, sum_in: torch.dtype) -> None:
    model = llama(num_hidden_layers=2).to(torch.bfloat16)
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    optimizer = torch.optim.SGD(masters, lr=0.5, momentum=0.9)
    for step in range(6):
        sums = [torch.zeros_like(p, dtype=sum_in) for p in params]
        for batch in token_batches(WINDOW, rows=1, length=8, seed=step):
            loss = model(**batch).loss
            loss.backward()
            for total, p in zip(sums, params, strict=True):
                total.add_(p.grad.to(sum_in) / WINDOW)
                p.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = total.float()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=4, length=8, seed=99)[0])


if __name__ == "__main__":
    train(sum_in=torch.bfloat16)
