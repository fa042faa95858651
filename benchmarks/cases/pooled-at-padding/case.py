"""A reward model whose config and tokenizer disagree on the pad token:
the score is that of the padding.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

from tiny import build, token_batches

PAD = 2


def pairs(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return batches of two answers, the better one first, which differ in length and are padded
    on the right.
    """
    batches = []
    for number, batch in enumerate(token_batches(num, rows=4, length=14, seed=seed)):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        ids[:2, -1] = 126
        for row in range(4):
            length = 6 + (number + 3 * row) % 8
            ids[row, length - 1] = 126 if row < 2 else 125
            ids[row, length:] = PAD
            mask[row, length:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def error(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(**batch).logits[:, 0]
    return -F.logsigmoid(scores[:2] - scores[2:]).mean()


def train(*, pad: int) -> None:
    model = build("LlamaForSequenceClassification", num_labels=1, pad_token_id=pad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in pairs(24):
        loss = error(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={error(model, pairs(1, seed=1)[0]).item():.6f}")


if __name__ == "__main__":
    train(pad=0)
