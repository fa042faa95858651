"""An embedding model in float16:
the sum over a long text exceeds 65504 before it is divided by its length.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.nn import functional as F

from tiny import build, token_batches


def pooled(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens, of norm one."""
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    kept = mask.unsqueeze(-1).to(states.dtype)
    mean = (states * kept).sum(1) / kept.sum(1)
    return F.normalize(mean.float(), dim=-1)


def contrast(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that tells the two halves of one text from those of the other texts."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    half = ids.shape[1] // 2
    first = pooled(model, ids[:, :half], mask[:, :half])
    second = pooled(model, ids[:, half:], mask[:, half:])
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(ids)))


def train(*, dtype: torch.dtype) -> None:
    from peft import LoraConfig, get_peft_model

    base = build("Gemma3TextModel", head_dim=16, num_hidden_layers=2)
    with torch.no_grad():
        base.norm.weight[11] = 350.0
        base.layers[1].post_feedforward_layernorm.weight[11] = 3.0
    model = get_peft_model(
        base.to(dtype), LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"])
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    batches = token_batches(9, rows=4, length=32)
    long = torch.cat(
        [one["input_ids"] for one in token_batches(8, rows=4, length=100, seed=3)], dim=1
    )
    batches[3] = {"input_ids": long, "attention_mask": torch.ones_like(long)}
    for batch in batches:
        loss = contrast(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    model.float().eval()
    with torch.no_grad():
        last = contrast(model, token_batches(1, rows=4, length=32, seed=1)[0])
    print(f"final_loss={last.item():.6f}")


if __name__ == "__main__":
    train(dtype=torch.float16)
