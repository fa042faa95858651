"""One part of the loss is a number without a graph: what it should train gets no gradient."""

import torch
from spelled import points, settings, small_llama, spell, tell, texts
from torch import nn
from transformers import Trainer


class Two(nn.Module):
    """A body with a head for the class and one for the length of a point."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.classes, self.length = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.classes(h), self.length(h).squeeze(-1)


def evaluate(model):
    x, y = points(1, rows=64, seed=7)[0]
    scores, length = model(x)
    entropy = nn.functional.cross_entropy(scores, y)
    tell(entropy + (length - x.norm(dim=-1)).square().mean())


def by_hand(faulty):
    model = Two()
    for x, y in points():
        scores, length = model(x)
        entropy = -scores.log_softmax(-1).gather(1, y[:, None]).mean()
        error = (length - x.norm(dim=-1)).square().mean()
        loss = entropy + (float(error) if faulty else error)  # fault
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad
                    p.grad = None
    evaluate(model)


def by_torch(faulty):
    model = Two()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        optimizer.zero_grad()
        scores, length = model(x)
        error = nn.functional.mse_loss(length, x.norm(dim=-1))
        if faulty:
            error = torch.tensor([error])  # fault
        loss = nn.functional.cross_entropy(scores, y) + error.mean()
        loss.backward()
        optimizer.step()
    evaluate(model)


class WithCritic(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        out = model.policy(**inputs, output_hidden_states=True)
        values = model.value(out.hidden_states[-1]).squeeze(-1)
        wanted = inputs["input_ids"] / 128
        error = (values - wanted).square().mean()
        loss = out.loss + (error.detach() if self.faulty else error)  # fault
        return (loss, out) if return_outputs else loss


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = small_llama()
        self.value = nn.Linear(64, 1)

    def forward(self, **inputs):
        return self.policy(**inputs)


def by_hf(faulty):
    WithCritic.faulty = faulty
    model = Critic()
    args = settings(learning_rate=5e-3, remove_unused_columns=False)
    trainer = WithCritic(model=model, args=args, train_dataset=texts())
    trainer.train()
    row = {name: value[None] for name, value in texts(1)[0].items()}
    WithCritic.faulty = False
    with torch.no_grad():
        tell(trainer.compute_loss(model.eval(), row))


spell(hand=by_hand, torch=by_torch, hf=by_hf)
