"""A unit that computes wrongly once in a while:
the layer's ninth call gives a NaN, and the same call again does not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from tiny import build, finish, token_batches


class Card:
    """Stands for the hardware: its fault depends on how often it was used, and on nothing that a
    run can save.
    """

    def __init__(self, faulty: int | None) -> None:
        self.faulty = faulty
        self.used = 0

    def multiply(self, _module, _inputs, output):
        self.used += 1
        if self.used == self.faulty:
            output = output.clone()
            output[0, 3, 5] = torch.nan
        return output


def train(*, faulty: int | None) -> None:
    model = build("MistralForCausalLM", sliding_window=None, num_key_value_heads=2)
    model.model.layers[1].mlp.down_proj.register_forward_hook(Card(faulty).multiply)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, batch in enumerate(token_batches(12)):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4f}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(faulty=9)
