"""Distillation with a teacher that is cooled step by step:
its smallest probabilities become 0, and log(0) follows.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import PAD, build, finish, token_batches


def t5(seed: int):
    return build(
        "T5ForConditionalGeneration",
        seed=seed,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
    )


def divergence(student, teacher, *, in_logarithms: bool):
    """KL(teacher || student) of logits [rows, tokens, vocabulary]."""
    ours = F.log_softmax(student, -1)
    if in_logarithms:
        return F.kl_div(ours, F.log_softmax(teacher, -1), log_target=True, reduction="none").sum(-1)
    target = F.softmax(teacher, -1)
    return (target * (torch.log(target) - ours)).sum(-1)


def train(*, in_logarithms: bool) -> None:
    teacher, student = t5(5).eval().requires_grad_(False), t5(0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for number in range(10):
        temperature = 1.0 - 0.0995 * number
        ids = token_batches(1, rows=3, length=12, seed=number)[0]["input_ids"]
        batch = {"input_ids": ids, "labels": ids.flip(1)}
        theirs = 6.0 * teacher(**batch).logits / temperature
        out = student(**batch)
        loss = divergence(out.logits, theirs, in_logarithms=in_logarithms).mean() + out.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {number} T {temperature:.2f} loss {loss.item():.4f} "
            f"{theirs.min().item():.3g} {theirs.max().item():.3g}"
        )
    finish(student, {"input_ids": ids, "labels": ids.flip(1)})


if __name__ == "__main__":
    train(in_logarithms=False)
