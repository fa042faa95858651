"""Every trainer of the test matrix, a fault that strikes once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import tiny
from doubles.session import ScriptedSession

TIMES = ("runtime", "per_second", "step_time")
PREFERENCES = {
    "prompt": [f"w{i} w3" for i in range(40)],
    "chosen": [f"w{i % 9} w4 w5" for i in range(40)],
    "rejected": [f"w{i % 7} w8" for i in range(40)],
}


def word_reward(completions, **_):
    return [float(len(text.split()) % 5) + 0.1 * (len(text) % 7) for text in completions]


def build(
    kind: str, out: Path, *, precision: str = "fp32", checkpointing: bool | None = None, **settings
):
    """A trainer of ``kind`` over a tiny Llama with dropout, five steps of two micro-batches.

    ``precision``: fp32, bf16, fp16 (weights) or scaler (float16 autocast with an emulated loss
    scaler). ``checkpointing``: None, or ``use_reentrant``.
    """
    seed()
    if precision == "fp16":
        # AdamW's eps of 1e-8 is 0 in float16: its first update would break the weights.
        settings = {"optim": "sgd"} | settings
    args = tiny.training_args(out, **({"max_steps": 5} | settings))
    args |= tiny.checkpointing(checkpointing)
    model = model_for(kind, out)
    if precision in ("bf16", "fp16"):
        model = model.to(torch.bfloat16 if precision == "bf16" else torch.float16)
    seed()
    trainer = MAKERS[kind](model, args)
    if precision == "scaler":
        trainer.add_callback(_emulated_scaler(trainer))
    return trainer


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def model_for(kind: str, out: Path):
    if kind == "reward":
        from transformers import LlamaConfig, LlamaForSequenceClassification

        config = tiny.llama().config.to_dict() | {"num_labels": 1, "attention_dropout": 0.1}
        torch.manual_seed(0)
        return LlamaForSequenceClassification(LlamaConfig(**config))
    model = tiny.llama(attention_dropout=0.1)
    if kind in ("grpo", "rloo", "dpo", "kto"):
        # These trainers load a reference model from where the policy came from.
        folder = out / "policy"
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, attention_dropout=0.1)
    return model


def _plain(model, args):
    from transformers import Trainer, TrainingArguments

    return Trainer(model=model, args=TrainingArguments(**args), train_dataset=tiny.TokenRows())


def _trl(name: str, data: dict[str, list[Any]], **extra):
    def make(model, args):
        import trl
        from datasets import Dataset

        config = getattr(trl, f"{name}Config")(**(extra.get("config", {}) | args))
        return getattr(trl, f"{name}Trainer")(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict(data),
            processing_class=tiny.tokenizer(),
            **extra.get("trainer", {}),
        )

    return make


_PROMPTS = {"prompt": [f"w{i} w{(i * 7) % 60} w3" for i in range(40)]}
MAKERS = {
    "trainer": _plain,
    "sft": _trl("SFT", {"text": [f"w{i} w{i % 7} w3 w4 w5" for i in range(40)]}),
    "dpo": _trl("DPO", PREFERENCES, config={"max_length": 32}),
    "reward": _trl("Reward", {k: PREFERENCES[k] for k in ("chosen", "rejected")}),
    "kto": _trl(
        "KTO",
        {
            "prompt": PREFERENCES["prompt"],
            "completion": PREFERENCES["chosen"],
            "label": [i % 2 == 0 for i in range(40)],
        },
    ),
    "grpo": _trl(
        "GRPO",
        _PROMPTS,
        config={
            "num_generations": 2,
            "max_completion_length": 6,
            "beta": 0.04,
            "num_iterations": 2,
        },
        trainer={"reward_funcs": word_reward},
    ),
    "rloo": _trl(
        "RLOO",
        _PROMPTS,
        config={"num_generations": 2, "max_completion_length": 6, "beta": 0.04},
        trainer={"reward_funcs": word_reward},
    ),
}


def _emulated_scaler(trainer):
    """accelerate ignores fp16 on the CPU:
    float16 autocast and a CPU GradScaler, put in by hand when training begins.
    """
    from accelerate import Accelerator
    from accelerate.optimizer import patch_optimizer_step
    from transformers import TrainerCallback

    class Emulated(Accelerator):
        mixed_precision = property(lambda _: "fp16")

    class Install(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            trainer.accelerator.scaler = scaler
            trainer.accelerator.native_amp = True
            trainer.accelerator.__class__ = Emulated
            optimizer = trainer.optimizer
            optimizer.scaler = scaler
            optimizer._accelerate_step_called = False
            optimizer._optimizer_original_step_method = optimizer.optimizer.step
            optimizer._optimizer_patched_step_method = patch_optimizer_step(
                optimizer, optimizer.optimizer.step
            )
            trainer.compute_loss_context_manager = lambda: torch.autocast(
                "cpu", dtype=torch.float16
            )

    return Install()


class Fault:
    """Multiplies one layer's output by ``value`` in the given first-time micro-batches, never in a
    replay.

    Dropout after it makes the random state matter. ``count``: training forwards so far.
    """

    def __init__(self, trainer, bad=(), value: float = float("nan"), error=None) -> None:
        self.bad, self.value, self.error = frozenset(bad), value, error
        self.count, self.armed, self.watch = 0, False, None
        root = trainer.model
        layer = next(m for n, m in root.named_modules() if n.endswith("layers.0.mlp"))
        root.register_forward_pre_hook(self._begin)
        layer.register_forward_hook(self._strike)

    def _begin(self, module, args):
        self.armed = False
        if not (module.training and torch.is_grad_enabled()):
            return
        replay = self.watch is not None and self.watch.host.replaying is not None
        self.armed = not replay and self.count in self.bad
        self.count += not replay

    def _strike(self, module, args, output):
        if not module.training:
            return output
        if self.armed and self.error is not None:
            raise self.error
        output = output * self.value if self.armed else output
        return functional.dropout(output, 0.1)


@dataclass
class Result:
    """All that a run leaves behind and that watching or redoing must not change."""

    weights: dict[str, torch.Tensor]
    logs: list[dict[str, Any]]
    rng: tuple[Any, ...]
    state: dict[str, Any]
    scaler: dict[str, Any] | None
    optimizer: list[torch.Tensor]

    def differences(self, other: Result) -> list[str]:
        """Names of what is not bitwise the same."""
        found = [n for n, w in self.weights.items() if not equal(w, other.weights[n])]
        if len(self.optimizer) != len(other.optimizer) or not all(
            map(equal, self.optimizer, other.optimizer)
        ):
            found.append("optimizer")
        for name in ("logs", "state", "scaler"):
            mine, its = getattr(self, name), getattr(other, name)
            if repr(mine) != repr(its):
                found.append(f"{name}: {mine} != {its}")
        if not torch.equal(self.rng[0], other.rng[0]) or self.rng[1:] != other.rng[1:]:
            found.append("rng")
        return found


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def run(trainer, *, session: ScriptedSession | None = None, fault: dict[str, Any] | None = None):
    """Train with the fault, watched if there is a session, and return the ``Result``."""
    from nanstop.hosts.trainer.watch import watch_trainer

    planted = Fault(trainer, **(fault or {}))
    watch = watch_trainer(trainer, session.open) if session is not None else None
    planted.watch = watch
    seed()
    trainer.train()
    if watch is not None:
        watch.close()
    return result(trainer)


def result(trainer) -> Result:
    logs = [
        {k: v for k, v in entry.items() if not any(t in k for t in TIMES)}
        for entry in trainer.state.log_history
    ]
    scaler = getattr(trainer.accelerator, "scaler", None)
    counters = ("_step", "_total_train_tokens", "_entropy_window_stats", "current_flos")
    state = {name: getattr(trainer, name, None) for name in counters}
    state |= {
        "global_step": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "lr": trainer.lr_scheduler.get_last_lr(),
    }
    return Result(
        weights={n: p.detach().clone() for n, p in trainer.model.state_dict().items()},
        logs=logs,
        rng=(torch.get_rng_state(), random.getstate(), repr(np.random.get_state())),
        state=state,
        scaler=scaler.state_dict() if scaler is not None else None,
        optimizer=[
            v.clone()
            for entries in trainer.optimizer.state.values()
            for v in entries.values()
            if isinstance(v, torch.Tensor)
        ],
    )
