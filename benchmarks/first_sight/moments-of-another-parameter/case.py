"""A run is resumed; its optimizer was built over the same parameters in another order."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

from collections import defaultdict

import torch
from torch import nn

from tiny import finish, llama, token_batches

LENGTH, BEFORE, AFTER = 16, 30, 12


def optimizer_of(model: nn.Module, *, backwards: bool) -> torch.optim.Optimizer:
    """An Adam with one group for each shape of a parameter."""
    groups = defaultdict(list)
    parameters = list(model.parameters())
    for parameter in reversed(parameters) if backwards else parameters:
        groups[tuple(parameter.shape)].append(parameter)
    ordered = [{"params": groups[shape]} for shape in sorted(groups)]
    return torch.optim.Adam(ordered, lr=2e-3)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, num: int, seed: int) -> None:
    for batch in token_batches(num, rows=4, length=LENGTH, seed=seed):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")


def train(*, backwards: bool) -> None:
    first = llama(num_hidden_layers=2, tie_word_embeddings=False)
    optimizer = optimizer_of(first, backwards=False)
    run(first, optimizer, BEFORE, seed=0)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt")

    saved = torch.load("saved.pt")
    model = llama(seed=1, num_hidden_layers=2, tie_word_embeddings=False)
    model.load_state_dict(saved["model"])
    resumed = optimizer_of(model, backwards=backwards)
    resumed.load_state_dict(saved["optimizer"])
    run(model, resumed, AFTER, seed=2)
    finish(model, token_batches(1, rows=4, length=LENGTH, seed=1)[0])


if __name__ == "__main__":
    train(backwards=True)
