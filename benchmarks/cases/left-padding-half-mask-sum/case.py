"""OPT in float16 with left padding:
the lowest float16 as a mask plus a negative score is -Inf for a whole row.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import build, token_batches


def padded(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return batches of two rows; in some the second row is shorter and padded on the left."""
    batches = token_batches(num, length=14, seed=seed)
    for batch in batches[2::3]:
        batch["input_ids"][1, :5] = 1
        batch["attention_mask"][1, :5] = 0
        batch["labels"][1, :5] = -100
    return batches


def train(*, attention: str) -> None:
    from peft import LoraConfig, get_peft_model

    base = build(
        "OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64, pad_token_id=1, dropout=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    with torch.no_grad():
        attending = base.model.decoder.layers[1].self_attn
        attending.q_proj.bias.view(4, 16)[2, 0] = 20.0
        attending.k_proj.bias.view(4, 16)[2, 0] = -20.0
    model = get_peft_model(base.half(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    for batch in padded(9):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    model.float().eval()
    with torch.no_grad():
        print(f"final_loss={model(**token_batches(1, seed=1)[0]).loss.item():.6f}")


if __name__ == "__main__":
    train(attention="eager")
