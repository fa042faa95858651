"""The updates are smaller than half of the last digit of the weights, which are kept in half."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer


def by_hand(faulty):
    model = net().to(torch.float16 if faulty else torch.float32)
    for x, y in points():
        loss = nn.functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-4 * p.grad  # fault
                p.grad = None
    finish(model)


def by_torch(faulty):
    model = net().to(torch.bfloat16 if faulty else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in points():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
        loss.backward()
        optimizer.step()  # fault
    finish(model)


def by_hf(faulty):
    model = small_llama().to(torch.bfloat16 if faulty else torch.float32)
    Trainer(model=model, args=settings(learning_rate=1e-5), train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
