"""Reward regression with weights in float16:
targets are not normalised, and a weight's gradient exceeds 65504.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.nn import functional as F

from tiny import build, token_batches


def error(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error in units of the targets, computed in float32."""
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = 100.0 * batch["input_ids"][:, :1].float()
    return F.mse_loss(scores.float(), targets)


def train(*, dtype: torch.dtype) -> None:
    model = build("GPTNeoXForSequenceClassification", num_labels=1, num_hidden_layers=2)
    with torch.no_grad():
        model.gpt_neox.final_layer_norm.weight.mul_(8.0)
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-6)
    for number, batch in enumerate(token_batches(24, rows=4)):
        loss = error(model, batch)
        (loss / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss={loss.item():.1f}")
    model.float().eval()
    with torch.no_grad():
        print(f"final_loss={error(model, token_batches(1, rows=4, seed=1)[0]).item():.6f}")


if __name__ == "__main__":
    train(dtype=torch.float16)
