"""Plans of models and trainers.

Made from calibration batches, applied in one call, undone bitwise.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.commands.plan.calibration import (
    WindowCalibration,
    calibration_step,
    model_loss,
    num_tokens,
    padded_copy,
    taken,
)
from nanstop.commands.plan.search import plan_precision
from nanstop.commands.plan.text import render
from nanstop.errors import NanstopError, unknown
from nanstop.hosts.model.view import PlainView
from nanstop.process.inject.progress import Follow
from nanstop.records import Calibration, PrecisionPlan
from nanstop.records.formats import BY_SHORT_NAME, HALF
from nanstop.records.remedies import of_the_forward
from nanstop.remedies.lasting import lasting
from nanstop.remedies.plan import atoms_of
from nanstop.replay.stand_in import standing_in
from nanstop.store.beside_weights import plan_in
from nanstop.store.plan_file import load_plan, save_plan

FORMATS: Mapping[str, str] = {
    **{name: name for name in HALF},
    **BY_SHORT_NAME,
    "half": "float16",
}
"""The formats that a plan can be made for, by every name that is understood."""

_NO_SCRIPTS = (".safetensors", ".bin", ".pt", ".pth", ".json", ".yaml", ".yml", ".gguf")

DEFAULT_LR = 1e-5
MAX_BATCHES = 4


class Plan:
    """A precision plan. ``record`` is all that is known of it; ``str`` gives it in words."""

    def __init__(self, record: PrecisionPlan) -> None:
        self.record = record

    @property
    def found(self) -> bool:
        """Whether there is a plan; else ``record.reason`` says why there is none."""
        return not self.record.reason

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as YAML. Errors: ``NanstopError`` for a place that can't be written."""
        try:
            save_plan(self.record, Path(path).expanduser())
        except OSError as error:
            raise NanstopError(f"cannot write {path}: {error.strerror or error}") from error

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> Applied:
        """Put the plan in force on a model now.

        The returned object's ``close()`` (or ``with`` block) undoes it bitwise.

        Give the optimizer where there is one already, so that its state takes the format of the
        parameters. Of the remedies that a run adopted, those that act on updates are for a model
        that is trained further: without an optimizer they are left out, and no weight changes its
        format for them. Errors: ``NanstopError`` for a module that the model does not have, and for
        a plan that says that there is none.
        """
        if not isinstance(model, nn.Module):
            raise NanstopError(f"a plan is applied to a torch module, not {type(model).__name__}")
        record = self.record
        if optimizer is None:
            record = replace(record, remedies=of_the_forward(record.remedies))
        return Applied(PlainView(model, optimizer), record)

    def __repr__(self) -> str:
        return f"Plan({self.record!r})"

    def __str__(self) -> str:
        return render(self.record)

    def _repr_html_(self) -> str:
        from nanstop.report.html.notebook import plan_html

        return plan_html(self.record, str(self))


class Applied:
    """A plan in force, as long as its model is there or until ``close``, whether anybody keeps
    this object or not.
    """

    def __init__(self, view: Any, record: PrecisionPlan) -> None:
        self._undo = ExitStack()
        self._undo.enter_context(lasting(view, atoms_of(record, view)))
        self._undo.enter_context(standing_in(view.root, "_nanstop_plan", self))
        # Left to the end of the interpreter, generators would be finished when their modules are
        # gone.
        self._at_exit = weakref.finalize(view.root, _close, weakref.ref(self))

    def close(self) -> None:
        """Undo the plan; calling it again does nothing."""
        self._at_exit.detach()
        self._undo.close()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close()


def _close(plan: weakref.ref[Applied]) -> None:
    applied = plan()
    if applied is not None:
        applied.close()


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in a file, or in the folder of a checkpoint or a run.

    Errors: ``NanstopError`` for one that is missing, damaged or of another version.
    """
    return Plan(load_plan(plan_in(Path(path))))


def record_of(plan: Plan | PrecisionPlan | str | os.PathLike[str] | None) -> PrecisionPlan | None:
    """Return the record of a plan that is given as one, as a record, or as the path of its file."""
    if plan is None or isinstance(plan, PrecisionPlan):
        return plan
    if isinstance(plan, Plan):
        return plan.record
    if isinstance(plan, (str, os.PathLike)):
        return load_plan(plan_in(Path(plan)))
    raise NanstopError(f"plan must be a plan or the path of one, not {type(plan).__name__}")


def require_fit(record: PrecisionPlan, trainer: Any) -> None:
    """Raise ``NanstopError`` for a plan that can't be put in force on a trainer's model."""
    from nanstop.hosts.trainer.view import HfView

    if trainer.model is not None:  # a trainer with model_init builds it when it trains
        view: Any = HfView(trainer)
        atoms_of(record, view)


def make_plan(
    target: Any,
    batches: Any = None,
    *,
    dtype: str | torch.dtype = "float16",
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    lr: float | None = None,
    updates: int = 3,
    seconds: float = 60.0,
) -> Plan:
    """Return the smallest plan for a model or a trainer; see ``nanstop.plan``."""
    if updates < 1 or not 0.0 < seconds < math.inf:
        raise NanstopError("updates and seconds must be positive")
    search = partial(plan_precision, dtype=format_named(dtype), updates=updates, seconds=seconds)
    if not isinstance(target, nn.Module):
        given = (batches, loss, optimizer, lr)
        if any(one is not None for one in given):
            raise NanstopError("a trainer brings its own batches, loss and optimizer")
        from nanstop.hosts.trainer.first_window import first_step

        return Plan(first_step(target, lambda step: plan_step(step, search)))
    if batches is None:
        raise NanstopError("plan(model) needs batches", hint="nanstop.plan(model, dataloader)")
    chosen = taken(batches, MAX_BATCHES, labelled=loss is None)
    _require_known_ids(PlainView(target), chosen)
    rate = _rate(optimizer, lr)
    padded = padded_copy(chosen, target) if loss is None else None
    made_up = () if padded is None else (padded,)
    every = (*chosen, *made_up)
    step: Any = calibration_step(target, every, loss=loss, optimizer=optimizer, lr=rate)
    calibration = Calibration(num_batches=len(chosen), num_tokens=num_tokens(chosen), lr=rate)
    return Plan(search(step, calibration=calibration, made_up=len(made_up)))


def plan_checkpoint(
    folder: Path, *, dtype: str, data: Path | None, lr: float | None, seconds: float
) -> Plan:
    """Return the plan of a checkpoint folder, calibrated on a file of token ids or on random
    ones.
    """
    from nanstop.hosts.model.load import RANDOM, load_model
    from nanstop.hosts.model.token_batches import batches_of, random_batches

    format_named(dtype)
    model: Any = load_model(folder)
    if data is None:
        batches, source = random_batches(model), RANDOM
    else:
        rows = model.get_input_embeddings().weight.shape[0]
        batches, source = batches_of(data, vocab=rows), str(data)
    _require_runs(folder, model, batches[0])
    found = make_plan(model, batches, dtype=dtype, lr=lr, seconds=seconds).record
    assert found.calibration is not None
    return Plan(replace(found, calibration=replace(found.calibration, data=source)))


def plan_script(
    command: Sequence[str], *, dtype: str, seconds: float, follow: Follow | None = None
) -> Plan:
    """Return the plan of what a script is about to train, which is not trained.

    ``follow``: as ``dry_run`` has it.
    """
    from nanstop.process.inject.dry_run import dry_run

    given = Path(command[0])
    if given.suffix in _NO_SCRIPTS and given.is_file():
        raise NanstopError(
            f"{given} is no script", hint="give the checkpoint's folder, or a training script"
        )
    options = {"dtype": format_named(dtype), "seconds": seconds}
    job = f"{__package__}.job"
    return Plan(dry_run(command, job, PrecisionPlan, options=options, follow=follow))


def plan_step(step: Any, search: Callable[..., PrecisionPlan]) -> PrecisionPlan:
    """Return the plan of a window that can be run again.

    A trainer's, or that of a script's own loop.
    """
    rates = [group.get("lr", 0.0) for group in step.view.optimizer.param_groups]
    calibration = Calibration(
        num_batches=len(step.batches),
        num_tokens=num_tokens(step.batches),
        data="the first window of the training",
        lr=float(max(rates)),
    )
    return search(WindowCalibration(step), calibration=calibration)


def format_named(dtype: str | torch.dtype) -> str:
    """Return the name of a format that a plan can be made for.

    Errors: ``NanstopError`` for any other.
    """
    given = str(dtype).removeprefix("torch.")
    if given not in FORMATS:
        raise unknown("format to plan for", given, FORMATS)
    return FORMATS[given]


def _require_runs(folder: Path, model: nn.Module, batch: Any) -> None:
    """Raise ``NanstopError`` where a model of a checkpoint cannot compute a loss of a batch of
    token ids.
    """
    from nanstop.hosts.model.load import as_one_error

    with as_one_error(folder, "the model cannot be run on token ids alone"), torch.no_grad():
        model_loss(model)(batch)


def _require_known_ids(view: PlainView, batches: Sequence[Any]) -> None:
    """Raise ``NanstopError`` for ids beyond the table.

    On an accelerator they would end the process.
    """
    name = view.embedding()
    table = getattr(view.root.get_submodule(name), "weight", None) if name is not None else None
    for place, batch in enumerate(batches):
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if table is None or not isinstance(ids, Tensor) or table.dim() != 2:
            continue
        if ids.is_floating_point():
            raise NanstopError(f"`input_ids` of batch {place} are {ids.dtype}, and no ids")
        if (
            int(ids.max()) >= len(table)
            and type(view.root.get_submodule(name or "")) is nn.Embedding
        ):
            raise NanstopError(
                f"batch {place}: id {int(ids.max())} is not in the vocabulary of {len(table)}"
            )


def _rate(optimizer: Optimizer | None, lr: float | None) -> float:
    if optimizer is not None:
        if lr is not None:
            raise NanstopError("give an optimizer or a learning rate, not both")
        return float(optimizer.param_groups[0].get("lr", 0.0))
    if lr is not None and not 0.0 < lr < math.inf:
        raise NanstopError(f"lr is {lr}; it must be a positive number")
    return DEFAULT_LR if lr is None else lr
