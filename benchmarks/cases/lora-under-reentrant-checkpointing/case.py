"""LoRA with a trained last norm under reentrant checkpointing:
the frozen embedding requires no gradient.
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, get_peft_model

from tiny import build, finish, token_batches


def train(*, reentrant: bool) -> None:
    base = build("PhiForCausalLM", resid_pdrop=0.0)
    torch.manual_seed(1)
    model = get_peft_model(
        base, LoraConfig(r=8, target_modules="all-linear", modules_to_save=["final_layernorm"])
    )
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    base.disable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    warnings.simplefilter("ignore")  # "None of the inputs have requires_grad=True", once a layer
    for step, batch in enumerate(token_batches(24, rows=3)):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(reentrant=True)
