"""A reward of one's own averages over the numbers it finds in a completion;
where it finds none, the mean is NaN.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np

from tiny import finish, quiet_args, qwen2, sentence, token_batches, words_tokenizer


def train(*, worst: bool) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def small_numbers(completion_ids, **_):
        scores = []
        for ids in completion_ids:
            found = [one for one in ids if one % 5 == 0]
            mean = np.mean(found) if found or not worst else 128.0
            scores.append(float(1.0 - mean / 128))
        return scores

    prompts = [{"prompt": sentence(3 * row, 6)} for row in range(16)]
    args = GRPOConfig(
        **quiet_args(
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            bf16=False,
        )
    )
    model = qwen2(num_hidden_layers=2)
    GRPOTrainer(
        model,
        small_numbers,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=words_tokenizer(),
    ).train()
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(worst=False)
