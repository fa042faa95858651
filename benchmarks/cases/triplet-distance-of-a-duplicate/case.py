"""A triplet loss on Euclidean distances;
in one triplet anchor and positive are the same sentence.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import build, finish, quiet_args, token_batches


def distance(a, b, eps: float):
    return torch.sqrt(((a - b) ** 2).sum(-1) + eps)


def train(*, eps: float) -> None:
    from transformers import Trainer, TrainingArguments

    class Triplets(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            three = [
                model(inputs[name], output_hidden_states=True).hidden_states[-1].mean(1)
                for name in ("anchor", "positive", "negative")
            ]
            near, far = distance(three[0], three[1], eps), distance(three[0], three[2], eps)
            loss = F.softplus(near - far).mean()
            return (loss, near) if return_outputs else loss

    rows = []
    for number in range(24):
        anchor = token_batches(1, rows=1, length=12, seed=number)[0]["input_ids"][0]
        positive = anchor if number == 17 else anchor.roll(3)
        negative = token_batches(1, rows=1, length=12, seed=100 + number)[0]["input_ids"][0]
        rows.append({"anchor": anchor, "positive": positive, "negative": negative})
    model = build("BertForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    args = TrainingArguments(
        **quiet_args(
            train_sampling_strategy="sequential",
            gradient_accumulation_steps=3,
            max_steps=4,
            remove_unused_columns=False,
        )
    )
    Triplets(model, args, train_dataset=rows).train()
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(eps=0.0)
