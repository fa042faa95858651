"""A mixture of experts in float16 with a fixed loss scale:
the forward pass is finite, a scaled gradient is not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches

SCALE = 65536.0


def train(*, scale: float) -> None:
    model = build(
        "MixtralForCausalLM", num_hidden_layers=2, num_local_experts=4, intermediate_size=64
    )
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj *= 0.01
        model.model.layers[1].post_attention_layernorm.weight.fill_(200.0)
        model.model.layers[0].mlp.experts.down_proj *= 8.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = token_batches(16)
    for number, batch in enumerate(batches):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        (loss / 2 * scale).backward()
        if number % 2:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(scale=SCALE)
