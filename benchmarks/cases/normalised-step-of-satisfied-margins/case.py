"""A reward model is trained on margins with steps of fixed length: the gradient over its norm."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import VOCAB, build

PAIRS, LENGTH, MARGIN = 4, 10, 0.5


class NormalisedSGD(torch.optim.Optimizer):
    """Each step has the length of the learning rate, as in sharpness-aware and normalised
    methods.
    """

    def __init__(self, params, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm() + group["eps"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / norm)


def batches(num: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Answers of large tokens are better than those of small ones."""
    generator = torch.Generator().manual_seed(seed)
    middle = VOCAB // 2
    return [
        (
            torch.randint(middle, VOCAB, (PAIRS, LENGTH), generator=generator),
            torch.randint(3, middle, (PAIRS, LENGTH), generator=generator),
        )
        for _ in range(num)
    ]


def train(*, eps: float) -> None:
    model = build("Qwen2ForSequenceClassification", num_labels=1, num_hidden_layers=2)
    optimizer = NormalisedSGD(model.parameters(), lr=0.05, eps=eps)

    def loss_of(better: Tensor, worse: Tensor) -> Tensor:
        surplus = model(input_ids=better).logits - model(input_ids=worse).logits
        return (MARGIN - surplus).relu().mean()

    for step, batch in enumerate(batches(24)):
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        better, worse = batches(1, seed=1)[0]
        surplus = model(input_ids=better).logits - model(input_ids=worse).logits
        print(f"final_loss={float(torch.nn.functional.softplus(-surplus).mean()):.6f}")


if __name__ == "__main__":
    train(eps=0.0)
