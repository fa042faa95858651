"""On-policy GRPO without a KL term:
the log shows a loss of 0.0 at every step, and the model learns.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import finish, llama, quiet_args, sentence, token_batches, words_tokenizer


def even_words(completion_ids, **_):
    return [sum(one % 2 == 0 for one in ids) / max(len(ids), 1) for ids in completion_ids]


def train(*, beta: float) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    prompts = [{"prompt": sentence(3 * row, 6)} for row in range(16)]
    args = GRPOConfig(
        **quiet_args(
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            generation_kwargs={"min_new_tokens": 8},
            beta=beta,
            bf16=False,
            max_steps=6,
        )
    )
    model = llama(num_hidden_layers=2)
    trainer = GRPOTrainer(
        model,
        even_words,
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=words_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    finish(trainer.model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(beta=0.0)
