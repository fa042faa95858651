"""A term that is only watched is added to the loss with a weight of 0;
its mean is over nothing, and 0 * NaN is NaN.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import build, finish, quiet_args, token_batches


def train(*, add_watched: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class Watched(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            rare = inputs.pop("rare")
            out = model(**inputs)
            sure = out.logits.detach().softmax(-1).max(-1).values
            on_rare = sure[rare].mean()
            loss = out.loss / self.current_gradient_accumulation_steps
            if add_watched:
                loss = loss + 0.0 * on_rare
            return (loss, out) if return_outputs else loss

    rows = []
    for number in range(48):
        batch = token_batches(1, rows=1, length=12, seed=number)[0]
        row = {name: held[0] for name, held in batch.items()}
        row["rare"] = (row["input_ids"] % 7 == 3) & (number not in (12, 13))
        rows.append(row)
    model = build("Olmo2ForCausalLM")
    args = TrainingArguments(
        **quiet_args(
            train_sampling_strategy="sequential",
            gradient_accumulation_steps=3,
            max_steps=8,
            logging_steps=2,
            remove_unused_columns=False,
        )
    )
    Watched(model, args, train_dataset=rows).train()
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(add_watched=True)
