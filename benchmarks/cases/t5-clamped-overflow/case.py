"""LoRA on T5 in float16: the model's own clamp hides that the residual stream exceeds the
format.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, token_batches


def train(*, dtype: torch.dtype) -> None:
    from peft import LoraConfig, get_peft_model

    base = build(
        "T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4,
        decoder_start_token_id=0, feed_forward_proj="relu", dropout_rate=0.0,
    )  # fmt: skip
    with torch.no_grad():
        for row, sign in ((3, 1.0), (17, -1.0)):
            base.encoder.block[1].layer[1].DenseReluDense.wo.weight[row] = sign * 1400.0
    model = get_peft_model(base.to(dtype), LoraConfig(r=8, target_modules=["q", "v", "wi"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    for batch in token_batches(10, length=12):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    model.float().eval()
    with torch.no_grad():
        print(f"final_loss={model(**token_batches(1, length=12, seed=1)[0]).loss.item():.6f}")


if __name__ == "__main__":
    train(dtype=torch.float16)
