"""A Trainer picks the answer's logits before the loss;
a row whose prompt fills the limit leaves none to pick.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import build, finish, quiet_args, token_batches


def train(*, keep_answers: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class AnswersOnly(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            picked = inputs.pop("completion_mask")[:, 1:].bool()
            out = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            logits, labels = out.logits[:, :-1][picked], inputs["input_ids"][:, 1:][picked]
            loss = F.cross_entropy(logits, labels) / self.current_gradient_accumulation_steps
            return (loss, out) if return_outputs else loss

    rows = []
    for number, batch in enumerate(token_batches(24, rows=1, length=18)):
        ids = batch["input_ids"][0]
        starts = 18 if number == 22 and not keep_answers else 6
        mask = (torch.arange(18) >= starts).long()
        rows.append(
            {"input_ids": ids, "attention_mask": torch.ones(18).long(), "completion_mask": mask}
        )
    model = build("GPTNeoXForCausalLM", hidden_dropout=0.0, attention_dropout=0.0)
    args = TrainingArguments(
        **quiet_args(
            train_sampling_strategy="sequential",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            max_steps=6,
            learning_rate=2e-3,
            remove_unused_columns=False,
        )
    )
    AnswersOnly(model, args, train_dataset=rows).train()
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(keep_answers=False)
