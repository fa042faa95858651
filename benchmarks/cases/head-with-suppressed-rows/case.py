"""The vocabulary is padded to a multiple of 128;
the logits of rows that are no token are -inf, as in generation.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import build, finish, quiet_args, token_batches

TOKENS = 120


def train(*, value: float) -> None:
    from transformers import Trainer, TrainingArguments

    class WithoutPadding(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            labels = inputs.pop("labels")
            out = model(**inputs)
            no_token = torch.arange(out.logits.shape[-1]) >= TOKENS
            logits = out.logits.masked_fill(no_token, value)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, out) if return_outputs else loss

    rows = []
    for number in range(16):
        batch = token_batches(1, rows=1, length=14, seed=number)[0]
        rows.append({name: held[0] % TOKENS for name, held in batch.items()})
    model = build("Starcoder2ForCausalLM", num_key_value_heads=2, residual_dropout=0.0)
    args = TrainingArguments(**quiet_args(train_sampling_strategy="sequential"))
    WithoutPadding(model, args, train_dataset=rows).train()
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(value=-torch.inf)
