"""The one seam to the outside: a ``Step`` that can be run again, and a ``ModelView`` that remedies
act through.

Adapters make these; everything else (replay, tracing, localization, trials, redo) only uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.numerics import room
from nanstop.numerics.parked import Away, is_tight
from nanstop.numerics.tensors import by_torch_alone, bytes_of
from nanstop.numerics.trained import held_by
from nanstop.records import RunFacts, StepId
from nanstop.replay.collectives import Collectives
from nanstop.replay.conditions import unheard
from nanstop.replay.copies.buffers import Buffers
from nanstop.replay.copies.snapshot import Snapshot, Trainable
from nanstop.replay.held import kept_awake
from nanstop.replay.rng import rng_kept
from nanstop.replay.undo import attributes_kept, without_gradients
from nanstop.replay.untouched import versions_kept

Batch = Mapping[str, Any]
"""A prepared micro-batch as the model's loss receives it;
positionals without a name are ``arg0``, ``arg1``, ...
"""


Measure = Callable[[Tensor], int]
"""What is measured of a tensor that is made on the way to a loss."""


class ModelView(Protocol):
    """What a remedy or the tracer must know of a model, without importing the library that built
    it.

    Module names everywhere in nanstop are those of ``root.named_modules()``.
    """

    @property
    def root(self) -> nn.Module: ...

    @property
    def optimizer(self) -> Optimizer | None: ...

    @property
    def others(self) -> tuple[Optimizer, ...]:
        """Other optimizers that train weights of the model, in turn with ``optimizer`` or of the
        same gradients.
        """
        ...

    def by(self, optimizer: Optimizer) -> ModelView:
        """Return the view with one of the others in the place of its optimizer."""
        ...

    def about_optimizer(self) -> Mapping[str, Any]:
        """Return the fields of ``RunFacts`` that are of its optimizer."""
        ...

    @property
    def scaler(self) -> Any:
        """The run's ``torch.amp.GradScaler``, or None."""
        ...

    @property
    def beside(self) -> list[nn.Module]:
        """Modules that are not under the root and that the loss calls, as far as they have been
        met: a teacher, a reference model, a criterion. Parts of them are named ``CLASS.PART``.
        """
        ...

    def met(self, module: nn.Module) -> None:
        """Note a module that is not under the root and that the loss calls."""
        ...

    @property
    def device_type(self) -> str:
        """``cpu``, ``cuda``, ...: of the trainable parameters."""
        ...

    def attention(self) -> str | None:
        """Return the attention kernel in use (``eager``, ``sdpa``, ...), or None if the model
        has no such switch.
        """
        ...

    def attention_choices(self) -> tuple[str, ...]:
        """Return the kernels that ``set_attention`` would accept here, the present one excluded."""
        ...

    def set_attention(self, kernel: str) -> None:
        """Switch the attention kernel of every layer."""
        ...

    def head(self) -> str | None:
        """Return the name of the output projection or classification head."""
        ...

    def embedding(self) -> str | None:
        """Return the name of the input embedding."""
        ...

    def token_ids(self, batch: Batch) -> Tensor | None:
        """Return the ids [batch, tokens] that enter the embedding, or None where the batch does
        not show them.
        """
        ...

    def logits(self, ids: Tensor) -> Tensor | None:
        """Return logits [batch, tokens, vocab] of ``ids``, the same for the same ids, without
        gradients; None of a model that does not predict each next token.
        """
        ...


def gradients_of(root: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that a model's parameters have now, by name, detached."""
    return {n: p.grad.detach() for n, p in root.named_parameters() if p.grad is not None}


def scale_of(view: ModelView) -> float | None:
    """Return the loss scale of a run, None where there is no scaler. Synchronises the device."""
    return float(view.scaler.get_scale()) if view.scaler is not None else None


@contextmanager
def undone(
    root: nn.Module,
    leaves: Sequence[Tensor],
    changed: Trainable,
    *,
    buffers: Buffers,
    notes: Iterable[Any] = (),
) -> Iterator[None]:
    """Undo on exit what runs inside change of a model:
    what every host's ``Step.isolated`` is made of.

    That is random state, modes, buffers (``notes``: those that runs inside go back to), what
    ``changed`` holds, and the gradients of ``leaves``, which are None on entry. Nothing is at
    another version than before. Errors: ``ShortOfMemoryError`` where the host has no room for a
    copy of what ``changed`` holds.
    """
    with (
        unheard(),
        kept_awake(root),
        rng_kept(),
        versions_kept((*leaves, *changed.tensors())),
        buffers.kept(*notes),
        attributes_kept((module, "training") for module in root.modules()),
        without_gradients(leaves),
        ExitStack() as undo,
    ):
        room.require("cpu", changed.num_bytes())  # a host that is short of memory ends processes
        undo.callback(Snapshot(changed).restore)
        yield


class Step(Protocol):
    """One optimizer step of the host: its accumulation window, which can be run again exactly."""

    @property
    def id(self) -> StepId: ...

    @property
    def view(self) -> ModelView: ...

    @property
    def facts(self) -> RunFacts: ...

    def learned(self, **facts: Any) -> None:
        """Have the step run by other facts from here on."""
        ...

    @property
    def batches(self) -> tuple[Batch, ...]:
        """One prepared micro-batch each, by reference."""
        ...

    @property
    def losses(self) -> tuple[Tensor | None, ...]:
        """The raw loss that each micro-batch first gave: detached, before any log filter; None
        where it raised.
        """
        ...

    @property
    def is_local(self) -> bool:
        """Whether a run takes no other process to it, but for its ``collectives``."""
        ...

    @property
    def collectives(self) -> Collectives:
        """What other processes take part in, of each of its micro-batches."""
        ...

    @property
    def calls_script(self) -> bool:
        """Whether a run calls a function of the script's own besides its models: a loss that
        counts, prints or remembers does so once more. No healthy step is run again then.
        """
        ...

    @property
    def rates(self) -> tuple[Any, ...]:
        """The learning rate of each group in this step, () where there is no update."""
        ...

    def update_of(self, names: Collection[str]) -> Step:
        """Return the step with the optimizer that trains the first of some parameters as that of
        its view, where several make its update.
        """
        ...

    def run(self, micro: int, batch: Batch | None = None) -> Tensor:
        """Forward and backward of micro-batch ``micro`` as the host does it, from the RNG state
        noted then.

        Gradients are added to ``.grad``. Returns the detached raw loss. ``batch`` replaces the
        recorded one (a dropped sample). Raises what the host's loss raises.
        """
        ...

    def update(self) -> None:
        """Apply the optimizer update as the host would (unscale, clip, step), with the learning
        rates of this step.
        """
        ...

    def isolated(self, *, with_update: bool = False) -> AbstractContextManager[None]:
        """Undo on exit, bitwise, everything that runs inside it change:
        RNG, gradients, buffers, host bookkeeping.

        Gradients start as None inside.
        ``with_update`` also keeps parameters, optimizer state and scaler.
        """
        ...


def parameters_of(view: ModelView) -> dict[str, Tensor]:
    """Return every parameter of the model and of its optimizers once, by name;
    those without one as ``parameter 0``.
    """
    named: dict[str, Tensor] = dict(view.root.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    held = chain.from_iterable(map(held_by, (view.optimizer, *view.others)))
    others = {id(p): p for p in held if id(p) not in known}
    return named | {f"parameter {i}": p for i, p in enumerate(others.values())}


def trainable_of(view: ModelView) -> Trainable:
    """Return the parameters, optimizers' state and scaler that an update of this model changes."""
    trained = {name: p for name, p in parameters_of(view).items() if p.requires_grad}
    return Trainable(trained, view.optimizer, view.scaler, view.others)


@contextmanager
def update_undone(step: Step) -> Iterator[None]:
    """Be ``step.isolated(with_update=True)``, with what is to be put back waiting where there is
    room for it: nobody but an investigation has that much of a device. Errors: as there.
    """
    changed = trainable_of(step.view)
    if place_of_copies(changed) is not None:
        with step.isolated(with_update=True):
            yield
        return
    on_host = sum(bytes_of(t) for t in changed.tensors() if t.device.type == "cpu")
    room.require("cpu", on_host)
    with step.isolated(), versions_kept(changed.tensors()), ExitStack() as undo:
        undo.callback(Snapshot(changed, device=None).restore)
        yield


def place_of_copies(changed: Trainable) -> str | None:
    """Return where a snapshot waits while a step is looked into: see ``room.place_for``."""
    return room.place_for(changed.tensors(), changed.parameters.values())


@contextmanager
def room_made(step: Step | None) -> Iterator[int]:
    """Have room inside to run a step again, where it is tight: the gradients that there are now
    away, and nothing kept for later by an allocator. Yield what a run takes then beyond what is
    held; 0 where there is room enough.
    """
    leaves = list(parameters_of(step.view).values()) if step is not None else []
    if step is None or not is_tight(leaves):
        yield 0
        return
    with by_torch_alone():
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    kinds = {gradient.device.type for gradient in gradients}
    with without_gradients(leaves):
        away = Away(gradients)
        try:
            for kind in kinds:
                room.give_back(kind)
            yield room.most_beyond_now(step.view.device_type)
        finally:
            for kind in kinds:
                room.give_back(kind)
            away.fetch()
