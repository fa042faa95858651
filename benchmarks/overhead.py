"""What watching a healthy run costs, beside other ways to look for NaN.

Qwen2, 6 layers of 384, batch 4 x 128, on CPU, under transformers' Trainer and in a raw loop.
Three figures a row:

- ratio: interleaved pairs of runs, with and without, in alternating order;
  geometric mean and 95 % interval (bootstrap).
- own time: share of the step time spent in nanstop's own code, found by sampling the stack in
  separate runs. The norm of the gradients counts as the host's: clipping computes it with or
  without nanstop.
- memory: tensors alive after a step, more than without, as a share of those without. Snapshots are
  told apart: they live in host memory, within bounds of their own.

The rows of `nanstop run` are taken in processes of their own, watched from above and without a call
of nanstop in them; their partners are processes of their own, too. What comes before the third step
is for `startup.py` to say.

    python benchmarks/overhead.py [--pairs N] [--steps N] [--threads N] [--only WORD]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from intervals import interval
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.debug_utils import DebugUnderflowOverflow

import nanstop
from nanstop.demo.quiet import quiet
from nanstop.replay.copies.snapshot import Snapshot
from nanstop.watches import LoopWatch

Around = Callable[[Any, nn.Module, Any], Any]

RESULTS = Path(__file__).parent / "results"
WARM_UP = 2
BATCH, LENGTH, VOCAB = 4, 128, 1024

OWN = str(Path(nanstop.__file__).parent)
TORCH = Path(torch.__file__).parent
HOST = (
    str(Path(transformers.__file__).parent),
    *(str(TORCH / part) for part in ("nn", "optim", "autograd")),
    __file__,
)
"""Code whose time is the training's own, whoever called it;
frames of anything else count for their caller.
"""


@dataclass
class Measured:
    """One run: seconds of each step after the warm-up, and bytes of tensors alive at its end."""

    steps: list[float] = field(default_factory=list)
    tensor_bytes: int = 0
    snapshot_bytes: int = 0

    def note_memory(self) -> None:
        """Count what is alive now."""
        self.tensor_bytes, self.snapshot_bytes = live_bytes()


@dataclass(frozen=True)
class Row:
    host: str
    method: str
    ratio: float
    low: float
    high: float
    own_share: float | None = None
    memory_share: float | None = None
    snapshot_mib: float | None = None


# ---- what is trained


def build_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            pad_token_id=0,
        )
    )


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, VOCAB, (num_rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Stopwatch(TrainerCallback):
    """From the end of one step to the end of the next, so that the data loader and the callbacks
    count too.
    """

    def __init__(self, measured: Measured, warm: Callable[[], None]) -> None:
        self.measured, self.warm = measured, warm
        self.last = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        if state.global_step > WARM_UP:
            self.measured.steps.append(now - self.last)
        if state.global_step == WARM_UP:
            self.warm()
        if state.global_step == state.max_steps:
            self.measured.note_memory()
        self.last = time.perf_counter()


def run_trainer(around: Around, steps: int, warm: Callable[[], None] = lambda: None) -> Measured:
    """Train under transformers' Trainer, in ``around(trainer, model, None)``; ``warm`` is called
    after the warm-up.
    """
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=steps + WARM_UP,
            logging_steps=5,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        model = build_model()
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Rows(BATCH * (steps + WARM_UP)),
            callbacks=[Stopwatch(measured, warm)],
        )
        with around(trainer, model, None):
            trainer.train()
    return measured


def run_loop(around: Around, steps: int, warm: Callable[[], None] = lambda: None) -> Measured:
    """Train in a plain loop, or through ``watch.step`` and ``watch.update`` where ``around``
    gives a watch.
    """
    measured = Measured()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    data = Rows(BATCH * (steps + WARM_UP))
    with around(None, model, optimizer) as watch:
        last = time.perf_counter()
        for step in range(steps + WARM_UP):
            ids = data.ids[BATCH * step : BATCH * (step + 1)]
            if isinstance(watch, LoopWatch):
                watch.step(lambda batch: model(**batch).loss, {"input_ids": ids, "labels": ids})
                watch.update(clip=1.0)
            else:
                model(input_ids=ids, labels=ids).loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            now = time.perf_counter()
            if step >= WARM_UP:
                measured.steps.append(now - last)
            if step + 1 == WARM_UP:
                warm()
            last = time.perf_counter()
        measured.note_memory()
    return measured


# ---- ways to look for NaN: each is a context around the training


@contextmanager
def nothing(trainer: Any, model: nn.Module, optimizer: Any) -> Iterator[None]:
    yield


@contextmanager
def watched(trainer: Any, model: nn.Module, optimizer: Any) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as out:
        target = (trainer,) if trainer is not None else (model, optimizer)
        with nanstop.watch(*target, out=out) as watch:
            yield watch
        assert watch.incidents == ()


@contextmanager
def anomaly_mode(trainer: Any, model: nn.Module, optimizer: Any) -> Iterator[None]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield


@contextmanager
def debug_underflow_overflow(trainer: Any, model: nn.Module, optimizer: Any) -> Iterator[None]:
    DebugUnderflowOverflow(model)
    yield


@contextmanager
def isfinite_hooks(trainer: Any, model: nn.Module, optimizer: Any) -> Iterator[None]:
    def check(module: nn.Module, _: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
            raise FloatingPointError(type(module).__name__)

    handles = [module.register_forward_hook(check) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()


SUPERVISED = "nanstop run"
METHODS: dict[str, Callable[..., Any]] = {
    "nanstop.watch": watched,
    SUPERVISED: nothing,
    "per-module isfinite hooks": isfinite_hooks,
    "DebugUnderflowOverflow": debug_underflow_overflow,
    "detect_anomaly": anomaly_mode,
}
HOSTS: dict[str, Callable[..., Measured]] = {"Trainer": run_trainer, "raw loop": run_loop}


# ---- figures


def pair_ratios(
    run: Callable[..., Measured], method: Callable[..., Any], pairs: int, steps: int
) -> list[float]:
    """Return time with over time without, one for each pair; the order alternates."""
    ratios = []
    for pair in range(pairs):
        order = (nothing, method) if pair % 2 else (method, nothing)
        seconds = {each: statistics.fmean(run(each, steps).steps) for each in order}
        ratios.append(seconds[method] / seconds[nothing])
    return ratios


class Sampler:
    """Samples the main thread's stack every millisecond and gives the time since the last sample to
    where it is now.

    A long operation delays the signal to its end, so it gets all of its time.
    """

    def __init__(self) -> None:
        self.own = 0.0
        self.total = 0.0
        self.last = 0.0

    def sample(self, _: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        self.total += now - self.last
        self.own += (now - self.last) if belongs_to_nanstop(frame) else 0.0
        self.last = time.perf_counter()

    def start(self) -> None:
        self.last = time.perf_counter()
        signal.signal(signal.SIGALRM, self.sample)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def belongs_to_nanstop(frame: FrameType | None) -> bool:
    """Return whose time this is: that of the innermost frame that is nanstop's or the
    training's.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OWN):
            return True
        if file.startswith(HOST):
            return False
        frame = frame.f_back
    return False


def own_share(run: Callable[..., Measured], steps: int) -> float:
    """Return the share of the time after the warm-up that nanstop's own code takes;
    opening the watch is left out.
    """
    sampler = Sampler()

    @contextmanager
    def sampled(trainer: Any, model: nn.Module, optimizer: Any) -> Iterator[Any]:
        with watched(trainer, model, optimizer) as watch:
            try:
                yield watch
            finally:
                sampler.stop()

    run(sampled, steps, sampler.start)
    return sampler.own / sampler.total


def live_bytes() -> tuple[int, int]:
    """Return bytes of all tensors alive, snapshots left out, and bytes of snapshots."""
    gc.collect()
    objects = gc.get_objects()
    tensors = storages(each for each in objects if isinstance(each, Tensor))
    kept = [each for each in objects if isinstance(each, Snapshot)]
    elsewhere = storages(
        tensor for each in objects if isinstance(each, nn.Module) for tensor in each.parameters()
    )
    held = {
        pointer: size
        for pointer, size in storages(within(kept)).items()
        if pointer not in elsewhere
    }
    snapshots = sum(held.values())
    return sum(tensors.values()) - snapshots, snapshots


def storages(tensors: Any) -> dict[int, int]:
    """Return bytes by address, so that views and shared weights count once."""
    found = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def within(roots: list[Any]) -> list[Tensor]:
    """Return the tensors that snapshots hold, through their containers."""
    seen: set[int] = set()
    found: list[Tensor] = []
    todo = list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, dict | list | tuple) or type(each).__module__ == Snapshot.__module__:
            todo.extend(gc.get_referents(each))
    return found


# ---- under the supervisor


def child(host: str, steps: int, *, sampled: bool) -> None:
    """Train with nothing around and print what was measured: the other half of ``in_child``."""
    sampler = Sampler()
    with quiet():
        measured = HOSTS[host](nothing, steps, sampler.start if sampled else lambda: None)
    sampler.stop()
    print(json.dumps(asdict(measured) | {"own_seconds": sampler.own, "seconds": sampler.total}))


def in_child(host: str, options: argparse.Namespace, *words: str, watched: bool) -> dict[str, Any]:
    """Return what a process of its own measured, watched by ``nanstop run`` or left alone."""
    with tempfile.TemporaryDirectory() as out:
        above = ["-m", "nanstop", "run", "--out", out] if watched else []
        settings = [f"--{name}={getattr(options, name)}" for name in ("steps", "threads")]
        command = [sys.executable, *above, __file__, f"--child={host}", *settings, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        if watched:
            summary = json.loads(Path(out, "summary.json").read_text())
            assert summary["steps"] == options.steps + WARM_UP
            assert summary["incidents"] == []
    return json.loads(done.stdout.splitlines()[-1])


def measure_supervised(host: str, pairs: int, options: argparse.Namespace) -> Row:
    ratios = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        found = {each: in_child(host, options, watched=each) for each in order}
        ratios.append(
            statistics.fmean(found[True]["steps"]) / statistics.fmean(found[False]["steps"])
        )
    ratio, low, high = interval(ratios)
    plain, under = (in_child(host, options, watched=each) for each in (False, True))
    sampled = in_child(host, options, "--sampled", watched=True)
    more = under["tensor_bytes"] - plain["tensor_bytes"]
    return Row(
        host,
        SUPERVISED,
        ratio,
        low,
        high,
        own_share=sampled["own_seconds"] / sampled["seconds"],
        memory_share=more / plain["tensor_bytes"],
        snapshot_mib=under["snapshot_bytes"] / 2**20,
    )


def measure(host: str, method: str, pairs: int, options: argparse.Namespace) -> Row:
    if method == SUPERVISED:
        return measure_supervised(host, pairs, options)
    run, steps = HOSTS[host], options.steps
    ratio, low, high = interval(pair_ratios(run, METHODS[method], pairs, steps))
    if method != "nanstop.watch":
        return Row(host, method, ratio, low, high)
    plain, with_watch = run(nothing, steps), run(watched, steps)
    more = with_watch.tensor_bytes - plain.tensor_bytes
    return Row(
        host,
        method,
        ratio,
        low,
        high,
        own_share=own_share(run, 3 * steps),
        memory_share=more / plain.tensor_bytes,
        snapshot_mib=with_watch.snapshot_bytes / 2**20,
    )


# ---- output


def table(rows: list[Row]) -> Table:
    shown = Table(title="Cost of looking for NaN in a healthy run")
    for name in ("host", "method", "time ratio", "95 % interval", "own time", "memory", "snapshot"):
        shown.add_column(name, justify="left" if name in ("host", "method") else "right")
    for row in rows:
        shown.add_row(
            row.host,
            row.method,
            f"{row.ratio:.3f}",
            f"{row.low:.3f} .. {row.high:.3f}",
            "" if row.own_share is None else f"{100 * row.own_share:.2f} %",
            "" if row.memory_share is None else f"{100 * row.memory_share:.2f} %",
            "" if row.snapshot_mib is None else f"{row.snapshot_mib:.0f} MiB",
        )
    return shown


def holds(row: Row) -> bool:
    """Return whether a row of nanstop keeps the bounds; rows of others have none."""
    if row.own_share is None or row.memory_share is None:
        return True
    return row.low <= 1.01 and row.own_share <= 0.01 and row.memory_share <= 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pairs", type=int, default=12, help="pairs for nanstop; others get a third"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="methods whose name holds this word")
    parser.add_argument("--child", choices=tuple(HOSTS), help=argparse.SUPPRESS)
    parser.add_argument("--sampled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        child(options.child, options.steps, sampled=options.sampled)
        return 0
    rows = []
    with quiet():
        for host in HOSTS:
            for method in METHODS:
                if options.only in method:
                    own = method in ("nanstop.watch", SUPERVISED)
                    pairs = options.pairs if own else max(2, options.pairs // 3)
                    rows.append(measure(host, method, pairs, options))
    Console().print(table(rows))
    RESULTS.mkdir(exist_ok=True)
    setting = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    asked = {name: getattr(options, name) for name in ("pairs", "steps", "threads", "only")}
    written = {"setting": setting | asked, "rows": [asdict(row) for row in rows]}
    (RESULTS / "overhead.json").write_text(json.dumps(written, indent=2) + "\n")
    return int(not all(map(holds, rows)))


if __name__ == "__main__":
    sys.exit(main())
