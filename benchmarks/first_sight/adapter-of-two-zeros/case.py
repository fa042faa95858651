"""LoRA adapters of a fresh slot; initialising the model afterwards set both matrices to zero."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tiny import finish, qwen2, token_batches


def wipe(model: nn.Module) -> None:
    """Give every adapter matrix the value that a cleared slot has."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.zeros_(parameter)


def train(*, wiped: bool) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"])
    model = get_peft_model(qwen2(num_hidden_layers=2), config)
    if wiped:
        wipe(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for number, batch in enumerate(token_batches(60, rows=4), start=1):
        loss = model(**batch).loss
        (loss / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(wiped=True)
