"""The negative log-likelihood is fed with raw scores: the loss falls without a bound."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer


def by_hand(faulty):
    model = net()
    for x, y in points():
        scores = model(x)
        if not faulty:
            scores = scores - scores.exp().sum(-1, keepdim=True).log()
        loss = -scores.gather(1, y[:, None]).mean()  # fault
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    finish(model)


def by_torch(faulty):
    model = nn.Sequential(*net(), nn.Identity() if faulty else nn.LogSoftmax(dim=-1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.NLLLoss()
    for x, y in points():
        optimizer.zero_grad()
        loss = criterion(model(x), y)  # fault
        loss.backward()
        optimizer.step()
    finish(model)


class Likelihood(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs["labels"]
        logits = model(inputs["input_ids"]).logits[:, :-1]
        scores = logits if self.faulty else logits.log_softmax(-1)
        loss = nn.functional.nll_loss(scores.flatten(0, 1), labels[:, 1:].flatten())  # fault
        return (loss, logits) if return_outputs else loss


def by_hf(faulty):
    Likelihood.faulty = faulty
    model = small_llama()
    Likelihood(model=model, args=settings(learning_rate=5e-3), train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
