"""What transformers' Trainer can do, each once plain and once watched:
all that a run leaves must be bitwise the same.

    python benchmarks/trainer_features.py [NAME ...]

Without a name it writes docs/trainer-features.md.

Compared are weights, optimizer state, the log without its times, counters, the random state, what
callbacks and metrics were given, and every tensor and number of every file that was saved. Under
watch nothing may be reported.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import nanstop

TIMES = ("runtime", "per_second", "step_time", "total_flos")
DOCS = Path(__file__).parent.parent / "docs" / "trainer-features.md"


class Rows(Dataset):
    """21 rows of ids, an odd number on purpose.
    ``ragged``: of different lengths, with an attention mask.
    """

    def __init__(self, num_rows: int = 21, *, ragged: bool = False, extra: bool = False) -> None:
        self.num_rows, self.ragged, self.extra = num_rows, ragged, extra

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.num_rows:
            raise IndexError(index)  # by which a plain loop over it ends
        generator = torch.Generator().manual_seed(index)
        length = 4 + index % 5 if self.ragged else 8
        ids = torch.randint(3, 32, (length,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone()}
        return row | ({"note": f"row {index}"} if self.extra else {})


class Stream(IterableDataset):
    """The same rows, without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = Rows(40)
        return (rows[index] for index in range(len(rows)))


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of ragged rows, padded with 0 and labels of -100."""
    longest = max(len(row["input_ids"]) for row in rows)

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.stack([F.pad(r[name], (0, longest - len(r[name])), value=value) for r in rows])

    mask = [F.pad(torch.ones_like(r["labels"]), (0, longest - len(r["labels"]))) for r in rows]
    return {
        "input_ids": fill("input_ids", 0),
        "labels": fill("labels", -100),
        "attention_mask": torch.stack(mask),
    }


def model() -> LlamaForCausalLM:
    """Two layers of 16, with dropout: every draw of the random state counts."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def seed() -> None:
    """Begin anew, for all three generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class Run:
    """One of the two runs of a feature:
    makes trainers, watches them if it is the watched one, keeps what they saw.
    """

    def __init__(self, folder: Path, incidents: Path | None) -> None:
        self.folder = folder
        self.incidents = incidents
        self.seen: list[Any] = []
        self.trainer: Any = None
        self.searched: Any = None
        self.said: list[str] = []
        self._watches: list[Any] = []

    def make(
        self, settings: dict[str, Any], *, kind: type[Trainer] = Trainer, **given: Any
    ) -> Trainer:
        """Return a trainer over the tiny model, watched in the watched run."""
        known = inspect.signature(TrainingArguments).parameters
        settings = {
            "output_dir": str(self.folder),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 6,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 0,
            "learning_rate": 1e-3,
        } | settings
        missing = settings.keys() - known.keys()
        if missing:
            raise NotHereError(f"transformers {transformers.__version__} has no `{missing.pop()}`")
        given = {"train_dataset": Rows(), "eval_dataset": Rows(6)} | given
        if "model_init" not in given:
            given = {"model": model()} | given
        seed()
        self.trainer = kind(args=TrainingArguments(**settings), **given)
        if self.incidents is not None:
            self._watches.append(nanstop.watch(self.trainer, out=self.incidents))
        return self.trainer

    def left(self) -> dict[str, Any]:
        """Return all that the run has left, by name."""
        for watch in self._watches:
            self.said += [one.diagnoses[0].code for one in watch.incidents if one.diagnoses]
            self.said += [one.code for one in watch.findings]
            watch.close()
        trainer, net = self.trainer, self.trainer.model or self.searched
        state, optimizer = trainer.state, trainer.optimizer
        return {
            "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
            "weights": dict(net.state_dict()),
            "gradients": [p.grad for p in net.parameters()],
            "moments": [dict(entry) for entry in optimizer.state.values()] if optimizer else [],
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in (optimizer.param_groups if optimizer else ())
            ],
            "log": timeless(state.log_history),
            "counters": [state.global_step, state.epoch, state.num_input_tokens_seen],
            "control": vars(trainer.control),
            "seen": self.seen,
        } | saved(self.folder)


class NotHereError(Exception):
    """This version of transformers, or this machine, lacks the feature."""


def timeless(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a log without what a clock has written."""
    return [{k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in log]


def saved(folder: Path) -> dict[str, Any]:
    """Return what every saved file holds; of the arguments, only that they do not name nanstop."""
    found: dict[str, Any] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(file.relative_to(folder))
        if b"nanstop" in file.read_bytes().replace(str(folder).encode(), b""):
            found[name] = "names nanstop"
        elif file.suffix == ".safetensors":
            found[name] = load_file(file)
        elif file.suffix in (".pt", ".pth"):
            found[name] = torch.load(file, weights_only=False)
        elif file.name == "trainer_state.json":
            state = json.loads(file.read_text())
            found[name] = state | {"log_history": timeless(state["log_history"])}
        else:
            found[name] = file.read_bytes() if file.suffix == ".json" else file.suffix
    return found


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same, tensors and arrays bit for bit."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def plain(run: Run, settings: dict[str, Any], **given: Any) -> None:
    """Make a trainer and train."""
    run.seen.append(repr(timeless([run.make(settings, **given).train().metrics])))


@dataclass(frozen=True)
class Feature:
    """``play`` trains by means of a ``Run``; ``settings`` are those of the trainer.
    ``slow``: not in the fast suite.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    play: Callable[[Run, dict[str, Any]], None] = plain
    slow: bool = True


# ---- how features are played that are more than a setting


def resume(run: Run, settings: dict[str, Any]) -> None:
    run.make(settings).train()
    checkpoint = str(run.folder / "checkpoint-3")
    run.make(settings | {"learning_rate": 3e-4}).train(resume_from_checkpoint=checkpoint)


def callbacks(run: Run, settings: dict[str, Any]) -> None:
    class Curious(TrainerCallback):
        """Writes down every event, halves the rate once, asks for a log, an evaluation and a
        save.
        """

        def on_event(self, name: str, state: Any, control: Any, **details: Any) -> None:
            run.seen.append((name, state.global_step, sorted(details.get("logs") or ())))
            if name == "on_step_end" and state.global_step == 3:
                details["optimizer"].param_groups[0]["lr"] *= 0.5
                control.should_evaluate = control.should_save = control.should_log = True

    def event(name: str) -> Callable[..., None]:
        return lambda self, args, state, control, **d: self.on_event(name, state, control, **d)

    for name in vars(TrainerCallback):
        if name.startswith("on_"):
            setattr(Curious, name, event(name))
    run.make(settings, callbacks=[Curious()]).train()


def early_stopping(run: Run, settings: dict[str, Any]) -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    plain(run, settings, callbacks=[stopping])


def out_of_memory(run: Run, settings: dict[str, Any]) -> None:
    class Large(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **details: Any) -> Any:
            if len(inputs["input_ids"]) > 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().compute_loss(model, inputs, *args, **details)

    plain(run, settings, kind=Large)


def trials(run: Run, settings: dict[str, Any]) -> None:
    trainer = run.make(settings, model_init=lambda *_: model())
    for rate in (1e-3, 1e-4):
        trainer.args.learning_rate = rate
        trainer.train()
        run.seen.append(timeless([trainer.evaluate()]))


def search(run: Run, settings: dict[str, Any]) -> None:
    try:
        from optuna.samplers import RandomSampler
    except ImportError:
        raise NotHereError("no backend of a search is installed") from None

    def init(*_: Any) -> LlamaForCausalLM:
        run.searched = model()
        return run.searched

    best = run.make(settings, model_init=init).hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)},
        n_trials=2,
        backend="optuna",
        sampler=RandomSampler(seed=0),
    )
    run.seen.append(repr(best))


def evaluated_in_mid_window(run: Run, settings: dict[str, Any]) -> None:
    class Between(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            run.seen.append(timeless([run.trainer.evaluate()]))

    plain(run, settings, callbacks=[Between()])


def metrics(run: Run, settings: dict[str, Any]) -> None:
    def accuracy(prediction: Any, **_: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}

    plain(
        run,
        settings,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )


def ragged(run: Run, settings: dict[str, Any]) -> None:
    plain(run, settings, train_dataset=Rows(ragged=True), data_collator=padded)


def stream(run: Run, settings: dict[str, Any]) -> None:
    plain(run, settings, train_dataset=Stream())


def extra_columns(run: Run, settings: dict[str, Any]) -> None:
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        run.seen.append([row["note"] for row in rows])
        return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}

    given = {"train_dataset": Rows(extra=True), "eval_dataset": Rows(6, extra=True)}
    plain(run, settings, data_collator=collate, **given)


def own_loss(run: Run, settings: dict[str, Any]) -> None:
    class Weighted(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(input_ids=inputs["input_ids"])
            weight = torch.linspace(0.5, 1.5, 32)
            logits = outputs.logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), weight)
            return (loss, outputs) if return_outputs else loss

    plain(run, settings, kind=Weighted)


def own_loss_function(run: Run, settings: dict[str, Any]) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / (num_items_in_batch if num_items_in_batch is not None else len(logits))

    plain(run, settings, compute_loss_func=loss)


def own_optimizer(run: Run, settings: dict[str, Any]) -> None:
    net = model()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    plain(run, settings, model=net, optimizers=(optimizer, schedule))


def twice(run: Run, settings: dict[str, Any]) -> None:
    trainer = run.make(settings)
    trainer.train()
    run.seen.append(timeless([trainer.evaluate()]))
    trainer.train()
    run.seen.append(timeless([trainer.predict(Rows(5)).metrics]))
    trainer.save_model(str(run.folder / "final"))


STEPS = {"save_strategy": "steps", "save_steps": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
BEST = EVALUATED | {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
FEATURES = (
    Feature("training, then evaluation, training again, prediction, save_model", {}, twice, False),
    Feature("resume", STEPS, resume, False),
    Feature("resume with `ignore_data_skip`", STEPS | {"ignore_data_skip": True}, resume),
    Feature(
        "resume of a model alone (`save_only_model`)", STEPS | {"save_only_model": True}, resume
    ),
    Feature("best model (`load_best_model_at_end`)", BEST, slow=False),
    Feature("best model and resume", BEST | {"eval_steps": 3, "save_steps": 3}, resume),
    Feature("early stopping", BEST, early_stopping),
    Feature("callbacks", {}, callbacks, False),
    Feature(
        "`auto_find_batch_size`",
        {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "max_steps": 3},
        out_of_memory,
    ),
    Feature("NEFTune", {"neftune_noise_alpha": 5.0}),
    Feature("push off", STEPS | {"push_to_hub": False, "hub_model_id": "somebody/model"}),
    Feature("search over trials with `model_init`", {"max_steps": 3}, trials),
    Feature("`hyperparameter_search`", EVALUATED | {"max_steps": 2}, search),
    Feature("`torch_compile`", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    Feature("jit (`jit_mode_eval`)", {"jit_mode_eval": True}),
    Feature("label smoothing", {"label_smoothing_factor": 0.1}),
    Feature("`group_by_length`", {"train_sampling_strategy": "group_by_length"}, ragged, False),
    Feature("ragged rows", {}, ragged),
    Feature(
        "accumulation remainder at the end of an epoch",
        {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2},
        slow=False,
    ),
    Feature("`max_steps` in mid-epoch", {"gradient_accumulation_steps": 4, "max_steps": 4}),
    Feature("evaluation in mid-window", {"max_steps": 3}, evaluated_in_mid_window, False),
    Feature("`compute_metrics`", EVALUATED, metrics),
    Feature(
        "`batch_eval_metrics` off, `eval_accumulation_steps`",
        EVALUATED | {"eval_accumulation_steps": 1},
        metrics,
    ),
    Feature("`include_num_input_tokens_seen`", {"include_num_input_tokens_seen": "all"}, ragged),
    Feature(
        "`include_num_input_tokens_seen` without padding",
        {"include_num_input_tokens_seen": "non_padding"},
        ragged,
    ),
    Feature("`save_total_limit`", STEPS | {"save_total_limit": 2}),
    Feature(
        "saving each epoch", {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}
    ),
    Feature("data loader workers", {"dataloader_num_workers": 2, "max_steps": 3}),
    Feature("gradient checkpointing", {"gradient_checkpointing": True}),
    Feature(
        "gradient checkpointing, reentrant",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    Feature("`average_tokens_across_devices` off", {"average_tokens_across_devices": False}),
    Feature("warm-up and cosine", {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    Feature(
        "reduction on a plateau",
        EVALUATED | {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"},
    ),
    Feature("`logging_first_step`", {"logging_first_step": True, "logging_steps": 4}),
    Feature("`logging_nan_inf_filter` off", {"logging_nan_inf_filter": False, "logging_steps": 2}),
    Feature("IterableDataset", {}, stream),
    Feature("`remove_unused_columns` off", {"remove_unused_columns": False}, extra_columns),
    Feature("own `compute_loss`", EVALUATED, own_loss),
    Feature("`compute_loss_func`", {}, own_loss_function),
    Feature("own optimizer and schedule", {}, own_optimizer),
    Feature("Adafactor", {"optim": "adafactor"}),
    Feature("no clipping (`max_grad_norm=0`)", {"max_grad_norm": 0.0}),
    Feature("bfloat16 autocast", {"bf16": True}),
    Feature("`torch_empty_cache_steps`", {"torch_empty_cache_steps": 2}),
    Feature("`eval_on_start`", EVALUATED | {"eval_on_start": True}),
)


@dataclass(frozen=True)
class Result:
    """``differences``: names of what is not the same.
    ``compared``: how many values were. ``missing``: why not run.
    """

    differences: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    compared: int = 0
    missing: str = ""


def play(feature: Feature, folder: Path) -> Result:
    """Play a feature plain, then watched, in the same folder, and compare what both have left."""
    left: list[dict[str, Any]] = []
    said: list[str] = []
    for incidents in (None, folder / "incidents"):
        run = Run(folder / "run", incidents)
        shutil.rmtree(run.folder, ignore_errors=True)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                feature.play(run, dict(feature.settings))
        except NotHereError as error:
            return Result(missing=str(error))
        left.append(run.left())
        said += run.said
        torch._dynamo.reset()
    first, second = left
    names = sorted({*first, *second})
    missing = object()
    wrong = [n for n in names if not same(first.get(n, missing), second.get(n, missing))]
    return Result(tuple(wrong), tuple(said), compared=len(names))


def row(feature: Feature, result: Result) -> str:
    """Return a line of the table."""
    if result.missing:
        return f"| {feature.name} | | not run: {result.missing} |"
    verdict = f"DIFFERS: {', '.join(result.differences)}" if result.differences else "bitwise equal"
    said = ", ".join(dict.fromkeys(result.said)) or "nothing"
    return f"| {feature.name} | {result.compared} | {verdict}; said: {said} |"


def table(results: list[tuple[Feature, Result]]) -> str:
    """Return docs/trainer-features.md."""
    ran = [one for _, one in results if not one.missing]
    equal = sum(not one.differences for one in ran)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [
        "# Features of transformers' Trainer under watch",
        "",
        "Written by `python benchmarks/trainer_features.py`: each feature once plain and once",
        "under `nanstop.watch`, a tiny Llama with dropout on the CPU. Compared are weights,",
        "gradients, optimizer state and groups, log, counters, control, random state, whatever",
        "callbacks, metrics and losses of the user saw, and every tensor and number of every file.",
        "",
        f"{versions}: {equal} of {len(ran)} bitwise equal.",
        "",
        "| feature | values and files compared | result |",
        "|---|---|---|",
        *(row(feature, result) for feature, result in results),
    ]
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> int:
    """Play the features whose names hold one of ``names``, or all, and print the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for feature in FEATURES:
        if not names or any(name in feature.name for name in names):
            with tempfile.TemporaryDirectory() as folder:
                results.append((feature, play(feature, Path(folder))))
            print(row(*results[-1]), flush=True)
            if not names:
                DOCS.write_text(table(results))
    return 1 if any(result.differences for _, result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
