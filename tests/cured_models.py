"""A Gemma 2 that leaves float16 in one norm, trained until it is cured: by a trainer, by TRL with
LoRA, by a loop.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nanstop
import tiny

ISLAND = "model.layers.1.post_feedforward_layernorm"
IDS = torch.arange(3, 19)[None]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@dataclass
class Cured:
    """``folder``: where it was saved. ``logits``: of IDS, as the watched model had them."""

    folder: Path
    logits: torch.Tensor
    model: Any
    watch: Any


def gemma2(gain: float = 4e4):
    """A Gemma 2 that is finite in float32 alone, or healthy with a small gain; loaded in float16,
    which leaves its buffers in the format that they are computed in.
    """
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES))
    massive = torch.arange(0, 32, 4)
    behind = model.model.layers[2]
    with torch.no_grad():
        model.get_submodule(ISLAND).weight[massive] = gain
        for norm in (behind.input_layernorm, behind.pre_feedforward_layernorm, model.model.norm):
            norm.weight.fill_(gain / 2)
            norm.weight[massive] = -1.0
    with tempfile.TemporaryDirectory() as folder:
        model.half().save_pretrained(folder)
        return Gemma2ForCausalLM.from_pretrained(folder, dtype=torch.float16)


@torch.no_grad()
def logits_of(model):
    was = model.training
    found = model.eval()(IDS).logits.clone()
    model.train(was)
    return found


def _watching(found: list[torch.Tensor]):
    from transformers import TrainerCallback

    class Last(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            found.append(logits_of(model))

    return Last()


def by_trainer(out: Path, model: Any = None, **settings) -> Cured:
    from transformers import Trainer, TrainingArguments

    found: list[torch.Tensor] = []
    trainer = Trainer(
        model=model or gemma2(),
        args=TrainingArguments(**tiny.training_args(out, optim="sgd", max_steps=2, **settings)),
        train_dataset=tiny.TokenRows(),
        processing_class=tiny.tokenizer(),
        callbacks=[_watching(found)],
    )
    watch = nanstop.watch(trainer, out=out / "n")
    trainer.train()
    trainer.save_model(str(out / "saved"))
    watch.close()
    return Cured(out / "saved", found[-1], trainer.model, watch)


def by_sft_with_lora(out: Path) -> Cured:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    gemma2().save_pretrained(out / "base")
    args = tiny.training_args(out, max_steps=2, max_length=32) | tiny.checkpointing(None)
    found: list[torch.Tensor] = []
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float16),
        args=SFTConfig(**args),
        train_dataset=Dataset.from_dict({"text": [f"w{i} w{i % 7} w3 w4 w5" for i in range(20)]}),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[_watching(found)],
    )
    watch = nanstop.watch(trainer, out=out / "n")
    trainer.train()
    trainer.save_model(str(out / "saved"))
    watch.close()
    return Cured(out / "saved", found[-1], trainer.model, watch)


def by_loop(out: Path, model: Any = None) -> Cured:
    model = model or gemma2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = tiny.TokenRows()
    with nanstop.watch(model, optimizer, out=out / "n") as watch:
        for step in range(2):
            ids = rows[step]["input_ids"][None]
            watch.step(lambda b: model(input_ids=b, labels=b).loss, ids)
            watch.update()
        logits = logits_of(model)
    model.save_pretrained(out / "saved")
    tiny.tokenizer().save_pretrained(out / "saved")
    return Cured(out / "saved", logits, model, watch)


MAKERS = {"trainer": by_trainer, "sft-lora": by_sft_with_lora, "loop": by_loop}
