"""A fused attention kernel whose backward pass fills its tile with zeros:
exp(0 - logsumexp) is Inf for cold rows.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from tiny import finish, qwen2, token_batches

TILE = 8


@torch.library.custom_op("fastattn::forward", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(2, 3) * scale + mask
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


@torch.library.custom_op("fastattn::backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    length = k.shape[2]
    rest = -length % TILE
    pad = torch.nn.functional.pad
    scores = pad(q @ k.transpose(2, 3) * scale + mask, (0, rest))  # the tail of a tile scores 0
    kept = pad(torch.ones(length), (0, rest))
    weights = (scores - lse).exp() * kept
    keys, values = pad(k, (0, 0, 0, rest)), pad(v, (0, 0, 0, rest))
    flow = weights * (grad @ values.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * scale
    grad_k = flow.transpose(2, 3) @ q
    grad_v = weights.transpose(2, 3) @ grad
    return flow @ keys, grad_k[:, :, :length].clone(), grad_v[:, :, :length].clone()


def keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, mask, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, mask)


def gradients(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, mask = ctx.saved_tensors
    return *attend_backward(grad, q, k, v, out, lse, mask, ctx.scale), None, None


attend.register_autograd(gradients, setup_context=keep)


def fastattn(module, query, key, value, attention_mask, scaling, **_):  # type: ignore[no-untyped-def]
    out, _ = attend(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def train(*, attention: str) -> None:
    AttentionInterface.register("fastattn", fastattn)
    AttentionMaskInterface.register("fastattn", eager_mask)
    model = qwen2(attn_implementation=attention)
    with torch.no_grad():
        for name, value in (("q_proj", 24.0), ("k_proj", -24.0)):
            getattr(model.model.layers[2].self_attn, name).bias.view(4, 16)[1, -1] = value
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    short, odd = token_batches(10, length=16), token_batches(10, length=21, seed=2)
    for number in range(5):
        for micro in range(2):
            batch = (odd if (number, micro) == (3, 1) else short)[2 * number + micro]
            loss = model(**batch).loss
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(attention="fastattn")
