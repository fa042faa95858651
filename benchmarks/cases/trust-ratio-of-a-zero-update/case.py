"""LAMB without a guard: the trust ratio divides by the norm of the update."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, get_peft_model

from tiny import build, finish, token_batches


class Lamb(torch.optim.Optimizer):
    """Adam whose step is scaled, tensor by tensor, by the norm of the weights over that of the
    update.
    """

    def __init__(self, params, lr: float, betas=(0.9, 0.999), eps: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                ratio = self.trust_ratio(parameter.norm(), update.norm())
                parameter.add_(update * ratio, alpha=-group["lr"])

    def trust_ratio(self, weights, update):
        return weights / update


class GuardedLamb(Lamb):
    """As in the paper's appendix: 1 where one of the two norms is 0."""

    def trust_ratio(self, weights, update):
        return torch.where((weights > 0) & (update > 0), weights / update, 1.0)


def train(*, optimizer: type[Lamb]) -> None:
    base = build("MistralForCausalLM")
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    update = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step, batch in enumerate(token_batches(10, rows=3)):
        loss = model(**batch).loss
        loss.backward()
        update.step()
        update.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(optimizer=Lamb)
