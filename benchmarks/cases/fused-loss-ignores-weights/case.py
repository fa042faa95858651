"""A fused cross-entropy makes its gradient in forward, as if the mean were taken:
weights of tokens are lost.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

from tiny import build, token_batches


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Loss of each token from its state;
    the gradient is made at once, so that logits need not be kept.
    """

    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            inputs = states.detach().requires_grad_(), weight.detach().requires_grad_()
            losses = F.cross_entropy(inputs[0] @ inputs[1].T, targets, reduction="none")
            ctx.made = torch.autograd.grad(losses.mean(), inputs)
        return losses.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        return *ctx.made, None


def error(model: torch.nn.Module, batch: dict[str, Tensor], *, fused: bool) -> Tensor:
    """Return the loss over answers;
    tokens of a question, the first half of a row, count nothing.
    """
    ids = batch["input_ids"]
    states = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()
    counts = (torch.arange(1, ids.shape[1]) >= ids.shape[1] // 2).repeat(len(ids)).float()
    if fused:
        losses = FusedLinearCrossEntropy.apply(states, model.lm_head.weight, targets)
    else:
        losses = F.cross_entropy(model.lm_head(states), targets, reduction="none")
    return (losses * counts).sum() / counts.sum()


def questions(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return rows whose first half is noise, from which nothing can be learned, and whose second
    half counts upwards.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = token_batches(num, rows=4, length=24, seed=seed)
    for batch in batches:
        batch["input_ids"][:, :12] = torch.randint(3, 128, (4, 12), generator=generator)
    return batches


def train(*, fused: bool) -> None:
    model = build("LlamaForCausalLM", num_hidden_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in questions(30):
        loss = error(model, batch, fused=fused)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        last = error(model, questions(1, seed=1)[0], fused=False)
    print(f"final_loss={last.item():.6f}")


if __name__ == "__main__":
    train(fused=True)
