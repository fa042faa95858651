"""LoRA is trained in float32, saved, and loaded again into the half-precision base:
float16 this time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tiny import build, finish, token_batches


def run(model, batches) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")


def train(*, adapter_in_float32: bool) -> None:
    batches = token_batches(16, rows=3)
    config = LoraConfig(r=4, target_modules=["query_key_value"])
    torch.manual_seed(1)
    model = get_peft_model(build("GPTNeoXForCausalLM", hidden_dropout=0.0).half(), config)
    run(model, batches[:8])
    model.save_pretrained("adapter")

    base = build("GPTNeoXForCausalLM", hidden_dropout=0.0).half()
    model = PeftModel.from_pretrained(
        base, "adapter", is_trainable=True, autocast_adapter_dtype=adapter_in_float32
    )
    run(model, batches[8:])
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(adapter_in_float32=False)
