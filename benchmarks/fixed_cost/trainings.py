"""The trainings: a Qwen2, by default of one layer of 32 with a batch of 4 x 64, under each host.

A ``Training`` is called with the number of steps, whether it is watched, and ``after``, which is
told -1 right before the first step, and then each step that is over.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import nanstop
from nanstop.decide.policy import Policy
from nanstop.demo.quiet import quiet
from nanstop.hosts.script import autowatch
from nanstop.report.announce import announcer
from nanstop.session.factory import opener, run_store

After = Callable[[int], None]
Training = Callable[[int, bool, After], None]

VOCAB, BATCH, LENGTH = 64, 4, 64


@dataclass(frozen=True)
class Shape:
    """Of a model, and how many tokens a row has."""

    layers: int = 1
    hidden: int = 32
    heads: int = 2
    length: int = LENGTH


SMALL = Shape()


def build_model(shape: Shape = SMALL) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=shape.hidden,
            intermediate_size=2 * shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def rows(step: int, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def texts(num_rows: int, length: int) -> list[list[int]]:
    """Return rows of words, each with an end: two equal words there would pass for padding."""
    ids = torch.randint(3, VOCAB, (num_rows, length))
    ids[:, -1] = 1
    return ids.tolist()


# ---- loops


def loop(
    num_steps: int,
    watched: bool,
    after: After,
    *,
    scaled: bool,
    num_micro: int,
    shape: Shape = SMALL,
) -> None:
    """A raw loop, watched through ``watch.step`` and ``watch.update``."""
    model = build_model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not watched:
        return _plain(model, optimizer, num_steps, after, scaled, num_micro, shape.length)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    with tempfile.TemporaryDirectory() as out, nanstop.watch(model, optimizer, out=out) as watch:
        after(-1)
        for step in range(num_steps):
            for _ in range(num_micro):
                watch.step(lambda given: model(**given).loss, rows(step, shape.length))
            watch.update(clip=1.0, scaler=scaler)
            after(step)
    assert watch.incidents == ()
    return None


def script(
    num_steps: int,
    watched: bool,
    after: After,
    *,
    scaled: bool,
    num_micro: int,
    shape: Shape = SMALL,
) -> None:
    """A raw loop without a call of nanstop in it, watched as `nanstop run` does."""
    with _watched_process() if watched else nullcontext():
        model = build_model(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        _plain(model, optimizer, num_steps, after, scaled, num_micro, shape.length)


@contextmanager
def _watched_process() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as out:
        store = run_store(out)
        autowatch.install(opener(Policy(), store, announcer(store.folder)))
        try:
            yield
        finally:
            autowatch.unwatch()
        assert store.own == set(), store.own


def _plain(
    model: nn.Module,
    optimizer: Any,
    num_steps: int,
    after: After,
    scaled: bool,
    num_micro: int,
    length: int,
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    after(-1)
    for step in range(num_steps):
        for _ in range(num_micro):
            loss = model(**rows(step, length)).loss / num_micro
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        after(step)


# ---- trainers


class _After(TrainerCallback):
    def __init__(self, after: After) -> None:
        self.after = after

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.after(-1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.after(state.global_step - 1)


def trainer(
    num_steps: int,
    watched: bool,
    after: After,
    *,
    build: Callable[..., Trainer],
    num_micro: int,
    shape: Shape = SMALL,
) -> None:
    """A trainer that logs every tenth step."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        settings = {
            "output_dir": folder,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": num_micro,
            "max_steps": num_steps,
            "logging_steps": 10,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 0,
        }
        built = build(build_model(shape), settings, BATCH * num_steps * num_micro)
        built.add_callback(_After(after))
        if not watched:
            built.train()
            return
        with nanstop.watch(built, out=f"{folder}/found") as watch:
            built.train()
        assert watch.incidents == ()


def plain_trainer(
    model: Any, settings: Mapping[str, Any], num_rows: int, length: int = LENGTH
) -> Trainer:
    ids = texts(num_rows, length)
    data = [{"input_ids": one, "labels": one} for one in ids]
    return Trainer(model=model, args=TrainingArguments(**settings), train_dataset=data)


def sft(model: Any, settings: Mapping[str, Any], num_rows: int) -> Trainer:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    ids = texts(num_rows, LENGTH)
    return SFTTrainer(
        model=model,
        args=SFTConfig(bf16=False, gradient_checkpointing=False, **settings),
        processing_class=_tokenizer(),
        train_dataset=Dataset.from_list([{"input_ids": one} for one in ids]),
    )


def dpo(model: Any, settings: Mapping[str, Any], num_rows: int) -> Trainer:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    words = [f"w{index}" for index in range(3, VOCAB)]
    texts = [" ".join(words[(shift + at) % 61] for at in range(16)) for shift in range(61)]
    entries = [
        {"prompt": texts[i % 61], "chosen": texts[i % 59], "rejected": texts[i % 53]}
        for i in range(num_rows)
    ]
    return DPOTrainer(
        model=model,
        ref_model=build_model(),
        args=DPOConfig(bf16=False, gradient_checkpointing=False, **settings),
        processing_class=_tokenizer(),
        train_dataset=Dataset.from_list(entries),
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    known = {f"w{index}": index for index in range(VOCAB)}
    splitting = Tokenizer(models.WordLevel(known, unk_token="w2"))
    splitting.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=splitting, pad_token="w0", eos_token="w1", unk_token="w2"
    )


TRAININGS: dict[str, Training] = {
    "trainer": partial(trainer, build=plain_trainer, num_micro=1),
    "trainer, accumulation 8": partial(trainer, build=plain_trainer, num_micro=8),
    "SFT": partial(trainer, build=sft, num_micro=1),
    "DPO": partial(trainer, build=dpo, num_micro=1),
    "loop": partial(loop, scaled=False, num_micro=1),
    "loop, scaler": partial(loop, scaled=True, num_micro=1),
    "loop, accumulation 8": partial(loop, scaled=False, num_micro=8),
    "script": partial(script, scaled=False, num_micro=1),
    "script, scaler": partial(script, scaled=True, num_micro=1),
    "script, accumulation 8": partial(script, scaled=False, num_micro=8),
}
