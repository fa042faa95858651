"""A Lion optimizer written from the paper is given the learning rate of AdamW."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import build, finish, token_batches


class Lion(torch.optim.Optimizer):
    """Sign of an interpolation of gradient and momentum (arXiv 2302.06675)."""

    def __init__(self, params, lr: float, betas=(0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum: Tensor = state["exp_avg"]
                update = momentum.lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - second)


def train(*, rate: float) -> None:
    model = build("GemmaForCausalLM", head_dim=16, num_hidden_layers=2)
    optimizer = Lion(model.parameters(), lr=rate, weight_decay=0.1)
    for step, batch in enumerate(token_batches(40, rows=4)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(rate=5e-2)
