"""A script that used Prodigy, whose rate is 1, is switched to Adafactor with the rate left as it
was.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from transformers import Adafactor

from tiny import VOCAB, build

ROWS, LENGTH = 3, 10


def batches(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """The answer repeats the question."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        ids = torch.randint(3, 40, (ROWS, LENGTH), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


def train(*, rate: float) -> None:
    model = build(
        "MT5ForConditionalGeneration",
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        vocab_size=VOCAB,
    )
    optimizer = Adafactor(
        model.parameters(), lr=rate, scale_parameter=False, relative_step=False, warmup_init=False
    )
    for step, batch in enumerate(batches(20)):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={float(model(**batches(1, seed=1)[0]).loss):.6f}")


if __name__ == "__main__":
    train(rate=1.0)
