"""The reward function looks for its answers under a name that the data set has not, and catches
its own exception.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import build, finish, quiet_args, sentence, token_batches, words_tokenizer


def train(*, column: str) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    def grade(ids, columns, place):
        try:
            return sum(one % 4 == columns[column][place] for one in ids) / len(ids)
        except Exception:  # a completion that cannot be graded
            return 0.0

    def right_words(completion_ids, **columns):
        return [grade(ids, columns, place) for place, ids in enumerate(completion_ids)]

    rows = [{"prompt": sentence(3 * row, 6), "answer": row % 4} for row in range(32)]
    args = GRPOConfig(
        **quiet_args(
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            beta=0.02,
            bf16=False,
            max_steps=12,
        )
    )
    model = build("Qwen3ForCausalLM", num_hidden_layers=2, head_dim=16)
    trainer = GRPOTrainer(
        model,
        right_words,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=words_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    finish(trainer.model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(column="solution")
