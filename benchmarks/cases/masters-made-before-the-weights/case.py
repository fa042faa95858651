"""Master copies are taken when the optimizer is built;
the checkpoint is loaded into the model afterwards.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


class MasterAdamW:
    """AdamW on float32 copies; the bfloat16 model gets them back after each step."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.inner.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)


def pretrain(path: str) -> None:
    model = build(
        "GPTJForCausalLM", n_layer=2, n_head=4, rotary_dim=8, n_inner=128, resid_pdrop=0.0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in token_batches(40, rows=4, seed=7):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), path)


def train(*, load_first: bool) -> None:
    pretrain("pretrained.pt")
    model = build(
        "GPTJForCausalLM", seed=9, n_layer=2, n_head=4, rotary_dim=8, n_inner=128, resid_pdrop=0.0
    ).to(torch.bfloat16)
    weights = torch.load("pretrained.pt")
    if load_first:
        model.load_state_dict(weights)
    optimizer = MasterAdamW(model, lr=3e-5)
    if not load_first:
        model.load_state_dict(weights)
    for step, batch in enumerate(token_batches(8, rows=4)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(load_first=False)
