"""Accumulation with accelerate; gradients are cleared where each micro-batch begins."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from accelerate import Accelerator

from tiny import build, finish, token_batches

WINDOW = 8


def train(*, clear_after: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model = build("GPTNeoXForCausalLM", num_hidden_layers=2, hidden_dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    for number, batch in enumerate(token_batches(WINDOW * 24, rows=1)):
        with accelerator.accumulate(model):
            if not clear_after:
                optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            if clear_after:
                optimizer.zero_grad()
        if number % WINDOW == WINDOW - 1:
            print(f"update {number // WINDOW} loss {loss.item():.4f}")
    finish(accelerator.unwrap_model(model), token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(clear_after=False)
