"""Calibration batches as a step: what a plan, before any training, is tried on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.errors import NanstopError
from nanstop.hosts.loop.function_micro import named_batch
from nanstop.hosts.loop.step import LoopStep
from nanstop.hosts.model.view import PlainView
from nanstop.records import Atom, RunFacts, StepId
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.remedies.apply import applied
from nanstop.replay.conditions import without_dropout
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.snapshot import ready_scaler
from nanstop.replay.rng import RngState, note_rng
from nanstop.replay.step import Batch, Step
from nanstop.replay.undo import attributes_kept
from nanstop.tracing.places import Line

Loss = Callable[[Any], Tensor]


@dataclass(slots=True)
class ScaledLoss:
    """What is minimized: ``loss`` of a batch, times ``scale`` before the backward.

    Nothing is dropped out meanwhile.
    """

    root: nn.Module
    loss: Loss
    scale: float = 1.0

    def backward(self, batch: Any) -> Tensor:
        with without_dropout(self.root):
            loss = self.loss(batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise NanstopError("the loss of a calibration batch must be a tensor of one number")
            (loss * self.scale).backward()
        return loss.detach()


@dataclass(slots=True)
class CalibrationMicro:
    """See ``hosts.loop.step.Micro``."""

    given: Any
    objective: ScaledLoss
    batch: Batch
    loss: Tensor | None = None
    rng: RngState = field(default_factory=note_rng)
    calls_script: bool = False
    reduced: bool = False

    def obstacle(self) -> str:
        return ""

    def rerun(self, batch: Batch | None) -> Tensor:
        return self.objective.backward(self.given if batch is None else batch)

    def leaves(self) -> tuple[Tensor, ...]:
        return ()

    def cuts(self) -> list[Line]:
        return []


class CalibrationStep(LoopStep):
    """A window of calibration batches; see ``commands.plan.trials.ScaledStep``."""

    objective: ScaledLoss

    @property
    def scale(self) -> float:
        return self.objective.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self.objective.scale = scale


class WindowCalibration:
    """The window of a trainer or a script as a calibration.

    Its own loss, times ``scale``; nothing is dropped out.

    A loss scaler of the run multiplies by 1 meanwhile.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.scale = 1.0
        self.id, self.view, self.facts = step.id, step.view, step.facts
        self.batches, self.losses, self.rates = step.batches, step.losses, step.rates

    def run(self, micro: int, batch: Batch | None = None) -> Tensor:
        with without_dropout(self.view.root), _losses_times(self.scale):
            return self._step.run(micro, batch)

    def update_of(self, names: Collection[str]) -> WindowCalibration:
        """See ``replay.step.Step``: one optimizer makes it."""
        del names
        return self

    def update(self) -> None:
        optimizer = self.view.optimizer
        if optimizer is not None:
            divide_gradients(optimizer, self.scale)
        self._step.update()
        ready_scaler(self.view.scaler)  # the next update unscales again

    @contextmanager
    def isolated(self, *, with_update: bool = False) -> Iterator[None]:
        scaler = self.view.scaler
        unit: tuple[Atom, ...] = ()
        if scaler is not None and scaler.is_enabled():
            unit = (Atom(remedy="loss_scale", value=repr(1.0 / scaler.get_scale())),)
        with self._step.isolated(with_update=with_update), applied(self.view, unit):
            yield


@contextmanager
def _losses_times(scale: float) -> Iterator[None]:
    """Have every backward begin with ``scale`` times what it would begin with.

    Done where all roads meet: a recorded loop calls the ``backward`` that it saw, whatever stands
    in its place by now.
    """
    if scale == 1.0:
        yield
        return
    graph: Any = torch.autograd
    own = graph._engine_run_backward

    def scaled(outputs: Any, starts: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> Any:
        outermost = torch._C._current_graph_task_id() == -1  # checkpointing begins others inside
        if outermost and kwargs.get("accumulate_grad"):
            starts = tuple(None if one is None else one * scale for one in starts)
        return own(outputs, starts, *args, **kwargs)

    with attributes_kept([(graph, "_engine_run_backward")]):
        graph._engine_run_backward = scaled
        yield


def calibration_step(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    lr: float,
) -> CalibrationStep:
    """Return a step over batches; without an optimizer its updates are AdamW's at ``lr``.

    The model is not changed.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise NanstopError("every parameter of the model is frozen: there is nothing to train")
    optimizer = optimizer or torch.optim.AdamW(trainable, lr=lr)
    view = PlainView(model, optimizer)
    objective = ScaledLoss(model, loss or model_loss(model))
    buffers = BufferNotes(model)
    step = CalibrationStep(
        id=StepId(run="calibration", step=0),
        view=view,
        facts=RunFacts(host="calibration"),
        micros=tuple(CalibrationMicro(batch, objective, named_batch(batch)) for batch in batches),
        buffers=buffers,
        start=buffers.note(),
        apply=lambda _: _unscaled_step(optimizer, objective.scale),
    )
    step.objective = objective
    return step


def taken(batches: Any, limit: int, *, labelled: bool) -> tuple[Any, ...]:
    """Return the first batches of an iterable.

    ``labelled``: token ids become ``input_ids`` and their own labels.

    Errors: ``NanstopError`` for what holds no batch, and for a batch that holds nothing to learn
    from.
    """
    if isinstance(batches, (Tensor, Mapping)):
        batches = (batches,)
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes):
        raise NanstopError(f"batches must be an iterable of batches, not {type(batches).__name__}")
    found = tuple(islice(batches, limit))
    if not found:
        raise NanstopError("there is no batch to calibrate on")
    found = tuple(map(_labelled, found)) if labelled else found
    for place, batch in enumerate(found):
        _require_content(f"batch {place}", batch, labelled=labelled)
    return found


def _require_content(what: str, batch: Any, *, labelled: bool) -> None:
    empty = batch is None or (isinstance(batch, (Mapping, Sequence)) and not batch)
    for name, value in named_batch(batch).items() if not empty else ():
        if isinstance(value, Tensor) and value.numel() == 0:
            raise NanstopError(f"{what} is empty: `{name}` has the shape {tuple(value.shape)}")
        if name in ("input_ids", "labels", "attention_mask") and not isinstance(value, Tensor):
            raise NanstopError(
                f"`{name}` of {what} is a {type(value).__name__}, not a tensor",
                hint='the tokenizer makes tensors with return_tensors="pt", a collator does',
            )
    if empty:
        raise NanstopError(f"{what} is empty")
    labels = batch.get("labels") if labelled and isinstance(batch, Mapping) else None
    if isinstance(labels, Tensor) and bool((labels == IGNORED_LABEL).all()):
        raise NanstopError(f"{what} has nothing to learn: every label is {IGNORED_LABEL}")


def padded_copy(batches: Sequence[Any], model: nn.Module) -> dict[str, Any] | None:
    """Return the first batch with a third of its first row masked at the end, and of its last row
    at the beginning.

    None where batches bring padding of their own, or have no mask to say what is padding.
    """
    masks = [one.get("attention_mask") if isinstance(one, Mapping) else None for one in batches]
    if not all(isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()) for mask in masks):
        return None
    batch: Mapping[str, Any] = batches[0]
    ids, mask = batch.get("input_ids"), batch["attention_mask"]
    cut = mask.shape[1] // 3
    if not isinstance(ids, Tensor) or ids.shape != mask.shape or not cut or "position_ids" in batch:
        return None
    kept = mask.clone()
    kept[0, -cut:] = 0
    if len(kept) > 1:
        kept[-1, :cut] = 0
    filler = getattr(getattr(model, "config", None), "pad_token_id", None)
    copy = {**batch, "attention_mask": kept}
    if isinstance(filler, int):
        copy["input_ids"] = ids.masked_fill(kept == 0, filler)
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == kept.shape:
        after = torch.zeros_like(kept)
        after[:, 1:] = 1 - kept[:, :-1]  # what would be predicted from padding
        copy["labels"] = labels.masked_fill((kept == 0) | (after == 1), IGNORED_LABEL)
    return copy


def num_tokens(batches: Iterable[Any]) -> int:
    """Return the number of token ids in batches."""
    ids = (batch.get("input_ids") for batch in batches if isinstance(batch, Mapping))
    return sum(one.numel() for one in ids if isinstance(one, Tensor))


def model_loss(model: nn.Module) -> Loss:
    """Return a loss that calls the model with a batch and takes the loss that it returns."""
    accepts = inspect.signature(model.forward).parameters
    fixed = {"use_cache": False} if "use_cache" in accepts else {}

    def loss(batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            output = model(**{**fixed, **batch})
        else:
            output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
        found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if found is None:
            raise NanstopError(
                f"{type(model).__name__} returns no loss for a calibration batch",
                hint="put labels into the batches, or give loss=FUNCTION of one batch",
            )
        return found

    return loss


def _labelled(batch: Any) -> Any:
    if isinstance(batch, Tensor) and not batch.is_floating_point():
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping) or "labels" in batch:
        return batch
    if not isinstance(batch.get("input_ids"), Tensor):
        return batch
    labels = batch["input_ids"].clone()
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        labels[mask == 0] = IGNORED_LABEL
    return {**batch, "labels": labels}


def _unscaled_step(optimizer: Optimizer, scale: float) -> None:
    divide_gradients(optimizer, scale)
    optimizer.step()


def divide_gradients(optimizer: Optimizer, scale: float) -> None:
    """Divide the gradients of an optimizer's parameters, in place."""
    if scale == 1.0:
        return
    for group in optimizer.param_groups:
        for gradient in (p.grad for p in group["params"] if p.grad is not None):
            gradient.div_(scale)
