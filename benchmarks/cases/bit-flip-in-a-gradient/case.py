"""A gradient arrives with a flipped bit, once;
the same micro-batch gives a sound one when it is computed again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import build, quiet_args, token_batches


class Link:
    """Carries gradients; the one that it carries as number ``fails_at`` arrives damaged."""

    def __init__(self, fails_at: int) -> None:
        self.num_carried, self.fails_at = 0, fails_at

    def carry(self, gradient: Tensor) -> Tensor:
        self.num_carried += 1
        if self.num_carried != self.fails_at:
            return gradient
        damaged = gradient.clone()
        damaged.view(torch.int32).view(-1)[100] |= 0x7F800001
        return damaged


def train(*, fails_at: int) -> None:
    from transformers import Trainer, TrainingArguments

    model = build("Phi3ForCausalLM", num_hidden_layers=2)
    link = Link(fails_at)
    model.model.layers[0].self_attn.o_proj.weight.register_hook(link.carry)
    rows = [{n: v[0] for n, v in one.items()} for one in token_batches(48, rows=1)]
    arguments = TrainingArguments(**quiet_args(gradient_accumulation_steps=3))
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.eval()
    with torch.no_grad():
        print(f"final_loss={model(**token_batches(1, seed=1)[0]).loss.item():.6f}")


if __name__ == "__main__":
    train(fails_at=14)
