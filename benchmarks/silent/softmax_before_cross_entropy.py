"""Cross-entropy is fed with probabilities; it takes logits."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer


def by_hand(faulty):
    model = net()
    for x, y in points():
        scores = model(x)
        if faulty:
            scores = scores.exp() / scores.exp().sum(-1, keepdim=True)  # fault
        picked = scores.gather(1, y[:, None]).squeeze(1)
        loss = (scores.exp().sum(-1).log() - picked).mean()  # fault
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.2 * p.grad
                p.grad = None
    finish(model)


def by_torch(faulty):
    model = nn.Sequential(*net(), nn.Softmax(dim=-1) if faulty else nn.Identity())  # fault
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)  # fault
        loss.backward()
        optimizer.step()
    finish(model[:-1])


class Probabilities(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs["labels"]
        logits = model(inputs["input_ids"]).logits[:, :-1]
        if self.faulty:
            logits = logits.softmax(-1)  # fault
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())  # fault
        return (loss, logits) if return_outputs else loss


def by_hf(faulty):
    Probabilities.faulty = faulty
    model = small_llama()
    Probabilities(model=model, args=settings(learning_rate=5e-3), train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
