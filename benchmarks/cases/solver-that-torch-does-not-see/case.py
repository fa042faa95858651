"""The loss holds a matching that NumPy computes;
for one batch it gives NaN, and no operation of torch has done it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import torch
from torch.nn import functional as F

from tiny import build, finish, token_batches


def sinkhorn(cost: np.ndarray, *, in_logarithms: bool) -> np.ndarray:
    """Transport plan [n, n] of a cost matrix;
    the plain form underflows where all costs of a row are large.
    """
    scaled = -cost / 0.02
    if in_logarithms:
        scaled = scaled - scaled.max(1, keepdims=True)
    plan = np.exp(scaled)
    with np.errstate(all="ignore"):
        for _ in range(20):
            plan = plan / plan.sum(1, keepdims=True)
            plan = plan / plan.sum(0, keepdims=True)
    return plan / len(plan)


class Matching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cost, in_logarithms):
        plan = sinkhorn(cost.detach().numpy(), in_logarithms=in_logarithms)
        ctx.save_for_backward(torch.from_numpy(plan))
        return torch.tensor(float((plan * cost.detach().numpy()).sum()))

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def train(*, in_logarithms: bool) -> None:
    model = build("Qwen2ForCausalLM", num_key_value_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(8):
        batch = token_batches(1, rows=4, length=12, seed=number)[0]
        out = model(**batch, output_hidden_states=True)
        means = F.normalize(out.hidden_states[-1].mean(1), dim=-1)
        targets = F.normalize(out.hidden_states[0].mean(1).detach(), dim=-1)
        if number == 5:
            targets = -means.detach().mean(0, keepdim=True).expand(4, -1) * 3.0
        cost = 1.0 - means @ targets.T
        loss = out.loss + 0.1 * Matching.apply(cost, in_logarithms)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4f} cost {cost.min().item():.3f}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(in_logarithms=False)
