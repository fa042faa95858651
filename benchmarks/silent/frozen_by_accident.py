"""Half of the model is run without a graph although the optimizer is to train it."""

from contextlib import nullcontext

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer


def by_hand(faulty):
    model = net()
    body, head = model[:-1], model[-1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in points():
        states = body(x)
        if faulty:
            states = states.data  # fault
        loss = nn.functional.cross_entropy(head(states), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(model)


def by_torch(faulty):
    model = net()
    body, head = model[:-1], model[-1]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        with torch.no_grad() if faulty else nullcontext():
            states = body(x)  # fault
        loss = nn.functional.cross_entropy(head(states), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(model)


class Features(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        with torch.no_grad() if self.faulty else nullcontext():
            states = model.model(**inputs).last_hidden_state  # fault
        logits = model.lm_head(states)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, logits) if return_outputs else loss


def by_hf(faulty):
    Features.faulty = faulty
    model = small_llama(tie_word_embeddings=False)
    Features(model=model, args=settings(learning_rate=5e-3), train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
