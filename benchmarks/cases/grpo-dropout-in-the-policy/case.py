"""GRPO with dropout in the policy:
completions are scored without it and trained with it, so that no ratio begins at 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import build, finish, quiet_args, sentence, token_batches, words_tokenizer


def even_words(completion_ids, **_):
    return [sum(one % 2 == 0 for one in ids) / max(len(ids), 1) for ids in completion_ids]


def train(*, disable_dropout: bool) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = [{"prompt": sentence(3 * row, 6)} for row in range(16)]
    args = GRPOConfig(
        **quiet_args(
            learning_rate=1e-4,
            per_device_train_batch_size=4,
            num_generations=4,
            num_iterations=2,
            max_completion_length=8,
            disable_dropout=disable_dropout,
            bf16=False,
            max_steps=8,
        )
    )
    model = build("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, initializer_range=0.1)
    GRPOTrainer(
        model,
        even_words,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=words_tokenizer(),
    ).train()
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(disable_dropout=False)
