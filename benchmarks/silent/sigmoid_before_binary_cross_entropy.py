"""A loss that takes logits of labels gets their probabilities."""

import torch
from spelled import net, points, settings, spell, tell
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer

from tiny import llama, token_batches


def tags(y):
    """Two labels of each point, either of which may hold."""
    return torch.stack([y % 2, y // 2], dim=-1).float()


def evaluate(model):
    x, y = points(1, rows=64, seed=7)[0]
    tell(nn.functional.binary_cross_entropy_with_logits(model(x), tags(y)))


def by_hand(faulty):
    model = net(outputs=2)
    for x, y in points():
        z, t = model(x), tags(y)
        if faulty:
            z = 1 / (1 + torch.exp(-z))  # fault
        loss = (z.clamp(min=0) - z * t + torch.log1p(torch.exp(-z.abs()))).mean()  # fault
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.2 * p.grad
                p.grad = None
    evaluate(model)


def by_torch(faulty):
    model = net(outputs=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    for x, y in points():
        optimizer.zero_grad()
        output = model(x)
        if faulty:
            output = torch.sigmoid(output)  # fault
        loss = criterion(output, tags(y))  # fault
        loss.backward()
        optimizer.step()
    evaluate(model)


class Tagger(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        wanted = inputs.pop("labels")
        logits = model(**inputs).logits
        scores = logits.sigmoid() if self.faulty else logits  # fault
        loss = nn.functional.binary_cross_entropy_with_logits(scores, wanted)  # fault
        return (loss, logits) if return_outputs else loss


def by_hf(faulty):
    Tagger.faulty = faulty
    config = LlamaConfig(**(llama(num_hidden_layers=1).config.to_dict() | {"num_labels": 2}))
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    rows = []
    for batch in token_batches(20):
        for ids in batch["input_ids"]:
            wanted = torch.tensor([float(ids[0] < 64), float(ids[0] % 2)])
            rows.append(
                {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": wanted}
            )
    Tagger(model=model, args=settings(learning_rate=5e-3), train_dataset=rows).train()
    with torch.no_grad():
        last = torch.stack([row["input_ids"] for row in rows[:8]])
        logits = model.eval()(input_ids=last).logits
    tell(
        nn.functional.binary_cross_entropy_with_logits(
            logits, torch.stack([row["labels"] for row in rows[:8]])
        )
    )


spell(hand=by_hand, torch=by_torch, hf=by_hf)
