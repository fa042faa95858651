"""The derivative of a root at zero is not finite; a hook turns what comes of it into zeros."""

import torch
from spelled import STEPS, finish_text, settings, small_llama, spell, tell, texts
from torch import nn
from transformers import Trainer


class Distance(nn.Module):
    """How far two views of a point are apart."""

    def __init__(self, faulty):
        super().__init__()
        torch.manual_seed(1)
        self.faulty = faulty
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, a, b):
        squares = (self.encoder(a) - self.encoder(b)).square().sum(-1)
        return squares.sqrt() if self.faulty else (squares + 1e-6).sqrt()  # fault


def pairs():
    """Batches of pairs; every fourth holds one pair of the same point twice."""
    generator = torch.Generator().manual_seed(0)
    for number in range(STEPS):
        a = torch.randn(16, 12, generator=generator)
        b = a + 0.3 * torch.randn(16, 12, generator=generator)
        if number % 4 == 1:
            b[3] = a[3]
        yield a, b


def evaluate(model):
    a, b = next(iter(pairs()))
    tell((model(a, b) - (a - b).norm(dim=-1)).square().mean())


def by_hand(faulty):
    model = Distance(faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for a, b in pairs():
        loss = (model(a, b) - (a - b).norm(dim=-1)).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad[p.grad != p.grad] = 0.0  # fault
        optimizer.step()
        optimizer.zero_grad()
    evaluate(model)


def by_torch(faulty):
    model = Distance(faulty)
    for p in model.parameters():
        p.register_hook(lambda grad: torch.nan_to_num(grad, 0.0, 0.0, 0.0))  # fault
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for a, b in pairs():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a, b), (a - b).norm(dim=-1))
        loss.backward()
        optimizer.step()
    evaluate(model)


class Spread(Trainer):
    """The loss of the language model and how far neighbouring states are apart."""

    faulty = True

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        out = model(**inputs, output_hidden_states=True)
        states = out.hidden_states[0]
        squares = (states[:, 1:] - states[:, :-1]).square().sum(-1)
        spread = squares.sqrt() if self.faulty else (squares + 1e-6).sqrt()  # fault
        loss = out.loss + 0.1 * (spread - 1).square().mean()
        return (loss, out) if return_outputs else loss


def by_hf(faulty):
    Spread.faulty = faulty
    model = small_llama()
    for p in model.parameters():
        p.register_hook(torch.nan_to_num)  # fault
    rows = texts()
    for row in rows[::4]:
        row["input_ids"][5] = row["input_ids"][4]
    Spread(model=model, args=settings(), train_dataset=rows).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
