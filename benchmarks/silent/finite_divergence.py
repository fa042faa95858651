"""The learning rate is far too large: the loss grows from update to update and stays finite."""

import torch
from spelled import STEPS, finish_text, settings, small_llama, spell, tell, texts
from torch import nn
from transformers import Trainer


def lines():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(16, 12, generator=generator)
        yield x, x[:, :3].sum(-1, keepdim=True)


def by_hand(faulty):
    torch.manual_seed(1)
    w, b = torch.randn(12, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    rate = 1.2 if faulty else 0.05
    for x, y in lines():
        loss = (x @ w + b - y).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in (w, b):
                p -= rate * p.grad  # fault
                p.grad = None
    tell(loss)


def by_torch(faulty):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0 if faulty else 3e-3)
    for x, y in lines():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()  # fault
    tell(loss)


def by_hf(faulty):
    model = small_llama()
    args = settings(learning_rate=1.0 if faulty else 3e-3, lr_scheduler_type="constant")
    Trainer(model=model, args=args, train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
