"""Quantisation-aware fine-tuning; weights and biases are measured by their largest entry."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tiny import VOCAB, build


class FakeQuantised(nn.Module):
    """Eight-bit steps of the largest entry; the gradient passes straight through."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, tensor: Tensor) -> Tensor:
        step = tensor.detach().abs().max().clamp(min=self.least) / 127
        coarse = (tensor / step).round().clamp(-127, 127) * step
        return tensor + (coarse - tensor).detach()


def reviews(num: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Good texts have large words."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        kind = torch.randint(2, (8,), generator=draw)
        words = torch.randint(3, VOCAB // 2, (8, 10), generator=draw) + kind[:, None] * VOCAB // 2
        made.append((words.clamp(max=VOCAB - 1), kind))
    return made


def train(*, least: float) -> None:
    model = build("BertForSequenceClassification", num_labels=2, num_hidden_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for step, (ids, labels) in enumerate(reviews(30, seed=0)):
        if step == 8:
            for parameter in ("weight", "bias"):
                parametrize.register_parametrization(
                    model.classifier, parameter, FakeQuantised(least)
                )
            nn.init.zeros_(model.classifier.parametrizations.bias.original)
        loss = F.cross_entropy(model(input_ids=ids).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        ids, labels = reviews(1, seed=1)[0]
        print(f"final_loss={F.cross_entropy(model(input_ids=ids).logits, labels).item():.6f}")


if __name__ == "__main__":
    train(least=0.0)
