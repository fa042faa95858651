"""Healthy runs: architectures x precisions x trainers, each a script of its own;
any alarm in one is a false alarm.

    python benchmarks/scoreboard_healthy.py ARCHITECTURE PRECISION TRAINER
    python benchmarks/scoreboard_healthy.py --list

Tiny models of random weights, 8 updates, nothing downloaded. Errors: ``SystemExit`` 3 where the run
by itself is not healthy: a loss that is not finite.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "cases"), str(Path(__file__).parent)]

STEPS = 8
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text",
    "gpt2", "gpt_neox", "gptj", "opt", "bloom", "phi", "phi3", "falcon", "olmo2", "cohere",
    "granite", "stablelm", "starcoder2", "smollm3", "glm", "deepseek_v3", "mamba", "biogpt",
)  # fmt: skip
PRECISIONS = ("float32", "bf16", "bf16-weights", "fp16-scaler")
TRAINERS = ("loop", "Trainer", "SFT", "DPO")
EXTRA = (
    ("llama", "float32", "GRPO"), ("qwen2", "bf16", "GRPO"), ("llama", "bf16", "KTO"),
    ("qwen2", "float32", "Reward"), ("gpt2", "float32", "GRPO"), ("mistral", "bf16", "Reward"),
    ("llama", "float32", "LoRA"), ("qwen3", "bf16", "LoRA"), ("qwen2", "fp16-scaler", "LoRA"),
    ("phi3", "float32", "checkpointing"), ("qwen2", "bf16", "checkpointing"),
    ("llama", "fp16-scaler", "clipping"),
)  # fmt: skip


def all_runs() -> Iterator[tuple[str, str, str]]:
    """Yield more than 100 combinations:
    every architecture in every precision, the trainers in turn.

    Gemma in float16 is left out: at its real size it overflows, and to say so beforehand is right.
    """
    pairs = itertools.product(ARCHITECTURES, PRECISIONS)
    for place, (architecture, precision) in enumerate(pairs):
        shift = place // len(PRECISIONS)
        trainer = TRAINERS[(place + shift) % len(TRAINERS)]
        if precision in ("fp16-scaler", "bf16-weights") and trainer in ("SFT", "DPO"):
            trainer = ("loop", "Trainer")[
                shift % 2
            ]  # a trainer on CPU has no float16, TRL no such weights
        if precision == "fp16-scaler":
            trainer = "loop"
        if not (precision == "fp16-scaler" and architecture.startswith("gemma")):
            yield architecture, precision, trainer
    yield from EXTRA


def run(architecture: str, precision: str, trainer: str) -> None:
    import torch

    torch.manual_seed(0)
    model = _model(architecture, precision)
    if trainer in ("loop", "LoRA", "checkpointing", "clipping"):
        loss = _loop(model, precision, trainer)
    elif trainer == "Trainer":
        loss = _trainer(model, precision)
    else:
        loss = _trl(model, precision, trainer)
    if not math.isfinite(loss):
        raise SystemExit(3)
    print(f"final_loss={loss:.6f}")


def _model(architecture: str, precision: str) -> Any:
    import torch
    from architectures_configs import part_for, tiny_config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from tiny import EOS, PAD

    kind = next(one for one in MODEL_FOR_CAUSAL_LM_MAPPING if one.model_type == architecture)
    built = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    config = part_for(tiny_config(kind), built.config_class)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD, EOS, EOS  # the tokenizer's
    model = built._from_config(config, dtype=torch.float32).train()
    return model.to(torch.bfloat16) if precision == "bf16-weights" else model


def _autocast(precision: str) -> Any:
    import torch

    formats = {"bf16": torch.bfloat16, "fp16-scaler": torch.float16}
    return torch.autocast("cpu", formats[precision]) if precision in formats else nullcontext()


def _loop(model: Any, precision: str, kind: str) -> float:
    import torch

    from tiny import token_batches

    if kind == "LoRA":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16-scaler")
    losses = [math.nan]
    for number, batch in enumerate(token_batches(2 * STEPS, length=12)):
        with _autocast(precision):
            loss = model(**batch).loss / 2
        scaler.scale(loss).backward()
        losses.append(2 * loss.item())
        if number % 2 == 0:
            continue
        if kind != "LoRA":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return max(losses[1:])


def _arguments(precision: str) -> dict[str, Any]:
    return {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": precision == "bf16",
    }


def _trainer(model: Any, precision: str) -> float:
    from transformers import Trainer, TrainingArguments

    from tiny import token_batches

    rows = [
        {name: value[i] for name, value in batch.items()}
        for batch in token_batches(2 * STEPS, length=12)
        for i in range(2)
    ]
    trainer = Trainer(
        model=model, args=TrainingArguments(**_arguments(precision)), train_dataset=rows
    )
    return trainer.train().training_loss


def _trl(model: Any, precision: str, kind: str) -> float:
    import trl
    from datasets import Dataset

    from tiny import sentence, words_tokenizer

    prompts = [sentence(i, 4) for i in range(32)]
    answers = [sentence(4 + i, 6) for i in range(32)]
    others = [sentence(60 + i, 5) for i in range(32)]
    rows: dict[str, list[Any]] = {
        "SFT": {"text": [f"{p} {a}" for p, a in zip(prompts, answers, strict=True)]},
        "DPO": {"prompt": prompts, "chosen": answers, "rejected": others},
        "GRPO": {"prompt": prompts},
        "KTO": {"prompt": prompts, "completion": answers, "label": [i % 2 == 0 for i in range(32)]},
        "Reward": {"prompt": prompts, "chosen": answers, "rejected": others},
    }[kind]
    more: dict[str, Any] = {}
    if kind == "GRPO":
        more = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8}
    settings = getattr(trl, f"{kind}Config")(**(_arguments(precision) | more))
    given: dict[str, Any] = {"processing_class": words_tokenizer()}
    if kind == "GRPO":
        given["reward_funcs"] = lambda completions, **_: [
            float(len(set(c.split()))) for c in completions
        ]
    if kind in ("DPO", "KTO"):
        given["ref_model"] = copy.deepcopy(model)
    if kind == "Reward":
        model = _scoring(model)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=settings, train_dataset=Dataset.from_dict(rows), **given
    )
    return trainer.train().training_loss


def _scoring(model: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    config = model.config
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.argv[1:] == ["--list"]:
        print(*(" ".join(one) for one in all_runs()), sep="\n")
    else:
        run(*sys.argv[1:])
