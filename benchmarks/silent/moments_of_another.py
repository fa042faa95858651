"""A run goes on from a checkpoint; queries and keys get each other's moments."""

import torch
from accelerate import Accelerator
from spelled import finish_text, small_llama, spell

from tiny import token_batches


def ordered(model, *, backwards):
    params = list(model.parameters())
    return params[::-1] if backwards else params


def regrouped(model, *, backwards):
    """Matrices and vectors in groups, each in the order in which they come."""
    params = ordered(model, backwards=backwards)
    shapes = sorted({tuple(p.shape) for p in params})
    return [{"params": [p for p in params if tuple(p.shape) == shape]} for shape in shapes]


def loop(model, update, seed):
    for batch in token_batches(10, rows=4, seed=seed):
        model(**batch).loss.backward()
        update()
        model.zero_grad()


def by_hand(faulty):
    model = small_llama(tie_word_embeddings=False)
    groups = regrouped(model, backwards=False)
    square = {p: torch.zeros_like(p) for group in groups for p in group["params"]}

    def rms():
        with torch.no_grad():
            for p, s in square.items():
                s.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p -= 1e-3 * p.grad / (s.sqrt() + 1e-8)

    loop(model, rms, seed=0)
    saved = list(square.values())
    groups = regrouped(model, backwards=faulty)
    square = dict(zip((p for g in groups for p in g["params"]), saved, strict=True))  # fault
    loop(model, rms, seed=1)
    finish_text(model)


def by_torch(faulty):
    model = small_llama(tie_word_embeddings=False)
    optimizer = torch.optim.Adam(regrouped(model, backwards=False), lr=3e-3)
    loop(model, optimizer.step, seed=0)
    torch.save(optimizer.state_dict(), "optimizer.pt")
    optimizer = torch.optim.Adam(regrouped(model, backwards=faulty), lr=3e-3)
    optimizer.load_state_dict(torch.load("optimizer.pt"))  # fault
    loop(model, optimizer.step, seed=1)
    finish_text(model)


def by_accelerate(faulty):
    accelerator = Accelerator(cpu=True)
    model = small_llama(tie_word_embeddings=False)
    optimizer = torch.optim.AdamW(regrouped(model, backwards=False), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    loop(model, optimizer.step, seed=0)
    saved = optimizer.state_dict()
    again = torch.optim.AdamW(regrouped(model, backwards=faulty), lr=3e-3)
    again = accelerator.prepare(again)
    again.load_state_dict(saved)  # fault
    loop(model, again.step, seed=1)
    finish_text(accelerator.unwrap_model(model))


spell(hand=by_hand, torch=by_torch, accelerate=by_accelerate)
