"""Supervised fine-tuning in which truncation has cut away every supervised token of one batch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import finish, llama, quiet_args, token_batches


def train(*, keep_answers: bool) -> None:
    from transformers import Trainer, TrainingArguments

    batches = token_batches(8)
    rows = [{name: value[row] for name, value in one.items()} for one in batches for row in (0, 1)]
    if not keep_answers:
        for row in rows[6:8]:
            row["labels"] = row["labels"].clone().fill_(-100)
    model = llama()
    args = TrainingArguments(**quiet_args(train_sampling_strategy="sequential"))
    Trainer(model, args, train_dataset=rows).train()
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(keep_answers=False)
