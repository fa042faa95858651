"""A patch against NaN sets the infinite scores of float16 attention to 0:
finite, and every token sees the future.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AttentionInterface

from tiny import finish, qwen2, token_batches


def patched(module, query, key, value, attention_mask, scaling, **_):  # type: ignore[no-untyped-def]
    """Unfused attention with the scores that are Inf set to 0."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    scores = torch.where(torch.isinf(scores), torch.zeros_like(scores), scores)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def train(*, attention: str) -> None:
    AttentionInterface.register("patched", patched)
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionMaskInterface.register("patched", eager_mask)
    model = qwen2(num_hidden_layers=2, attn_implementation=attention)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.view(4, 16)[:2, -1] = 310.0
            layer.self_attn.k_proj.bias.view(4, 16)[:2, -1] = -310.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in token_batches(12, rows=4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(attention="patched")
