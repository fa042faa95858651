"""An 8-bit Adam in Python: the table that codes its moments has no entry for 0."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import VOCAB, build

ROWS, LENGTH, CLASSES = 4, 12, 3


class Adam8bit(torch.optim.Optimizer):
    """Adam whose moments are kept as 8-bit places in a table, with one scale a tensor."""

    def __init__(self, params, lr: float, table: Tensor, betas=(0.9, 0.999), eps=1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.table = table

    def pack(self, value: Tensor) -> tuple[Tensor, Tensor]:
        scale = value.abs().max().clamp(min=1e-12)
        middles = (self.table[1:] + self.table[:-1]) / 2
        return torch.bucketize(value / scale, middles).to(torch.uint8), scale

    def unpack(self, packed: tuple[Tensor, Tensor]) -> Tensor:
        return self.table[packed[0].int()] * packed[1]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                mean, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
                if state:
                    mean, square = self.unpack(state["mean"]), self.unpack(state["square"])
                mean = mean.lerp(gradient, 1 - group["betas"][0])
                square = square.lerp(gradient.square(), 1 - group["betas"][1])
                parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
                state["mean"], state["square"] = self.pack(mean), self.pack(square)


def batches(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Which of three ranges most tokens are from."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        labels = torch.randint(CLASSES, (ROWS,), generator=generator)
        ids = 3 + labels[:, None] * 40 + torch.randint(40, (ROWS, LENGTH), generator=generator)
        made.append({"input_ids": ids.clamp(max=VOCAB - 1), "labels": labels})
    return made


def train(*, table: Tensor) -> None:
    model = build(
        "RobertaForSequenceClassification",
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    optimizer = Adam8bit(model.parameters(), lr=3e-4, table=table)
    for step, batch in enumerate(batches(12)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={float(model(**batches(1, seed=1)[0]).loss):.6f}")


if __name__ == "__main__":
    train(table=torch.linspace(-1, 1, 256))
