"""Gemma 3 under float16 autocast:
one dialect drives a gated product of the middle layer beyond 65504.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, in_float16, quiet_args, token_batches

DIALECT = 120


def rows(num: int) -> list[dict[str, torch.Tensor]]:
    """Return texts; one has the token that the feed-forward network answers with huge values."""
    found = [{n: v[0] for n, v in one.items()} for one in token_batches(num, rows=1)]
    for row in found:
        for name in ("input_ids", "labels"):
            row[name][row[name] == DIALECT] = DIALECT - 1
    for name in ("input_ids", "labels"):
        found[19][name][5] = DIALECT
    return found


def train(*, half: bool) -> None:
    from transformers import Trainer, TrainingArguments

    model = build("Gemma3ForCausalLM", head_dim=16)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 9] = 0.0
        model.model.embed_tokens.weight[DIALECT, 9] = 1.2
        network = model.model.layers[1].mlp
        for projection in (network.gate_proj, network.up_proj):
            projection.weight[30] = 0.0
            projection.weight[30, 9] = 85.0
        network.down_proj.weight[:, 30] *= 1e-2
    arguments = TrainingArguments(
        **quiet_args(
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
            learning_rate=5e-4,
        )
    )
    kind = in_float16(Trainer) if half else Trainer
    kind(model=model, args=arguments, train_dataset=rows(32)).train()
    model.eval()
    with torch.no_grad():
        print(f"final_loss={model(**token_batches(1, seed=1)[0]).loss.item():.6f}")


if __name__ == "__main__":
    train(half=True)
