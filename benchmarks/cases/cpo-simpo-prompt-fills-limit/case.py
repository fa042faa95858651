"""SimPO in TRL's CPOTrainer: one prompt alone fills max_length, and both of its answers are
empty.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import finish, llama, quiet_args, sentence, token_batches, words_tokenizer


def train(*, keep_answers: bool) -> None:
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    rows = [
        {
            "prompt": sentence(5 * row, 30 if row == 9 and not keep_answers else 8),
            "chosen": " " + sentence(5 * row + 8, 6),
            "rejected": " " + sentence(3 * row + 60, 7),
        }
        for row in range(16)
    ]
    model = llama(num_hidden_layers=2)
    args = CPOConfig(
        **quiet_args(
            train_sampling_strategy="sequential",
            max_steps=8,
            bf16=False,
            loss_type="simpo",
            cpo_alpha=0.5,
            max_length=28,
        )
    )
    CPOTrainer(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=words_tokenizer()
    ).train()
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(keep_answers=False)
