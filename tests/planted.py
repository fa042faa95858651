"""Small modules with one planted fault, and how their localization is read."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.localize.localize import localize

NAN, INF = float("nan"), float("inf")
ROWS, TOKENS, HIDDEN, VOCAB = 2, 16, 8, 64


def ids(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (ROWS, TOKENS), generator=generator)


def text_batch():
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


class Body(nn.Module):
    """Runs a function as a module of its own."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Net(nn.Module):
    """Embedding, Linear, the body under study, head and cross-entropy."""

    def __init__(self, body, dtype=torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.body = body if isinstance(body, nn.Module) else Body(body)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.to(dtype)

    def forward(self, input_ids, labels):
        hidden = self.body(self.proj(self.embed(input_ids)))
        logits = self.head(hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def called(model, batch):
    """The model's own loss, whether it returns one or an output object."""
    output = model(**batch)
    return (output if isinstance(output, torch.Tensor) else output.loss).float()


def located(model, loss=called, batch=None, *, optimizer=None, update=False, phase="forward"):
    step = FnStep(model, loss, [text_batch() if batch is None else batch], optimizer)
    return localize(step, 0, update=update, phase=phase)


def located_body(body, dtype=torch.float32, **options):
    """Localization of ``Net`` with ``body``: the op, if any, is in module ``body``."""
    return located(Net(body, dtype), **options)


def op_of(found) -> str:
    """``mul`` for ``aten.mul.Tensor``."""
    return found.key.op.split(".")[1]
