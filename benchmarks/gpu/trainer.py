"""Step time and peak memory of transformers' ``Trainer``, watched and not, as its users have it:
whole short runs that take turns, timed from one step's end to another's.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import nanstop
from gpu import models
from gpu.machine import Machine, Row
from gpu.overhead import Block, against

FIRST = 12
"""Steps before those that are timed: a run is looked at more closely in its first ones."""
STEPS, PAIRS = 20, 4


def run(machine: Machine) -> Iterator[Row]:
    """Return a row for each way to train."""
    for how, checkpointing in (("full", False), ("full", True), ("LoRA", True)):
        what = f"Trainer, {how}, checkpointing {'on' if checkpointing else 'off'}"
        blocks = {False: Block(), True: Block()}
        for pair in range(1 if machine.toy else PAIRS):
            if not machine.goes_on(f"{what}, pair {pair}"):
                break
            for watched in (False, True) if pair % 2 else (True, False):
                with machine.within_memory(what):
                    _run(machine, how, blocks[watched], watched=watched, again=checkpointing)
        if blocks[True].milliseconds:
            yield {"trains": how, "checkpointing": checkpointing} | against(
                blocks[False], blocks[True]
            )


class Timer(TrainerCallback):
    """Notes when the steps that are timed begin and end, with all that they started."""

    def __init__(self, machine: Machine, first: int, steps: int) -> None:
        self._machine, self._first, self._last = machine, first, first + steps
        self._began, self.milliseconds = 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step not in (self._first, self._last):
            return
        self._machine.synchronise()
        now = time.perf_counter()
        if state.global_step == self._first:
            self._began = now
            if self._machine.has_cuda:
                torch.cuda.reset_peak_memory_stats()
        else:
            self.milliseconds = 1e3 * (now - self._began) / (self._last - self._first)


class Rows(Dataset[Any]):
    """The same few rows of random tokens again and again."""

    def __init__(self, vocab: int, length: int, num_rows: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self._rows = torch.randint(3, vocab, (8, length), generator=draw)
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self._rows[index % len(self._rows)]
        return {"input_ids": ids, "labels": ids}


def trained(
    machine: Machine,
    how: str,
    callback: TrainerCallback,
    num_steps: int,
    *,
    watched: bool,
    again: bool = False,
) -> None:
    """Train a small Qwen2 for some steps; ``again``: with checkpointing."""
    rows, length = (2, 16) if machine.toy else (2, 2048)
    model = models.qwen2("toy" if machine.toy else "0.5B", machine)
    trained = models.made_trainable(model, how, machine)
    if again:
        model.enable_input_require_grads()
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        args = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=rows,
            max_steps=num_steps,
            learning_rate=1e-5,
            bf16=machine.has_cuda,
            gradient_checkpointing=again,
            gradient_checkpointing_kwargs={"use_reentrant": False} if again else None,
            optim="adamw_torch_fused",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not machine.has_cuda,
        )
        data = Rows(model.config.vocab_size, length, rows * num_steps)
        trainer = Trainer(model=trained, args=args, train_dataset=data, callbacks=[callback])
        watch = nanstop.watch(trainer, out=f"{out}/nanstop") if watched else None
        trainer.train()
        assert watch is None or watch.incidents == (), watch.incidents


def _run(machine: Machine, how: str, block: Block, *, watched: bool, again: bool) -> None:
    first, steps = (1, 2) if machine.toy else (FIRST, STEPS)
    timer = Timer(machine, first, steps)
    trained(machine, how, timer, first + steps, watched=watched, again=again)
    block.milliseconds.append(timer.milliseconds)
    if machine.has_cuda:
        block.peaks.append(torch.cuda.max_memory_allocated())
