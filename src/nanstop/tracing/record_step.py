"""One recorded, undone run of a step, for everybody who looks at operations.
May synchronise the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field
from traceback import clear_frames
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.errors import ShortOfMemoryError
from nanstop.frozen import frozen
from nanstop.numerics.checksums import checksums
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.room import let_go
from nanstop.numerics.tensors import is_plain, nonfinite
from nanstop.numerics.trained import held_by
from nanstop.records import Phase
from nanstop.replay.conditions import Under, eager, forward_only
from nanstop.replay.step import Batch, Step, gradients_of
from nanstop.tracing.op_patches import Look, ReachedError, SecondRun
from nanstop.tracing.recorder import Op, Recorder, Trace, Value

_SAME_LOSS, _COMPILED_LOSS = 1e-5, 1e-2
"""Share of a loss by which two runs of one micro-batch differ at the most, by rounding; of one that
was compiled, and is run again without.
"""


@frozen
class Recording:
    """A recorded run: its trace, what it gave and what it raised.

    ``failed``: by "loss" and names of parameters, the values that are not finite: of the loss, of
    gradients or, after an update, of parameters. ``loss_values``: the loss as the trace knows it.
    ``grads``: where they were asked for.
    """

    micro: int
    trace: Trace
    loss: Tensor | None
    error: Exception | None
    failed: Mapping[str, tuple[Value, ...]]
    loss_values: tuple[Value, ...]
    grads: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def reaches(self) -> tuple[str, ...]:
        """Return what the failure reached, an exception first."""
        return (("exception",) if self.error is not None else ()) + tuple(self.failed)

    def whole_trace(self) -> Trace:
        """Return the trace of a run that went through. Raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.trace


def known_tensors(step: Step, micro: int) -> dict[str, Tensor]:
    """Return every tensor that has a name before the step runs:
    parameters, buffers, batch, optimizer state.
    """
    root = step.view.root
    named: dict[str, Tensor] = dict(root.named_parameters())
    named |= {f"buffer {name}": buffer for name, buffer in root.named_buffers()}
    named |= dict(_batch_tensors({**step.batches[micro], **given_in_objects(step, micro)}))
    return named | dict(_optimizer_state(step))


def given_in_objects(step: Step, micro: int) -> dict[str, Tensor]:
    """Return what a model is given of a micro-batch in objects of other classes, by names of its
    own: no run has others in their place.
    """
    batch, given = step.batches[micro], getattr(step, "given_in_objects", lambda _: {})(micro)
    known = {id(value) for value in batch.values()}
    return {name: one for name, one in given.items() if name not in batch and id(one) not in known}


def _batch_tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    pending: list[tuple[str, Any]] = [(str(key), value) for key, value in batch.items()][::-1]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Tensor):
            yield f"batch[{name}]", value
        elif isinstance(value, Mapping):
            pending += [(f"{name}.{key}", item) for key, item in value.items()][::-1]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}.{place}", item) for place, item in enumerate(value)][::-1]


def _optimizer_state(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Yield what an update reads besides the parameters:
    their gradients, where there are any yet, and the moments.
    """
    optimizer = step.view.optimizer
    if optimizer is None:
        return
    names = {id(p): name for name, p in step.view.root.named_parameters()}
    for parameter in held_by(optimizer):
        owner = names.get(id(parameter), "?")
        if parameter.grad is not None:
            yield f"state gradient of {owner}", parameter.grad
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"state {key} of {owner}", value


def record(
    step: Step,
    micro: int,
    *,
    update: bool = False,
    phase: Phase = "forward",
    under: Under = nullcontext,
    look: Look | None = None,
    keep_grads: bool = False,
    batch: Batch | None = None,
) -> Recording:
    """Run a micro-batch (or, with ``update``, the whole window and then its update) under the
    recorder, and undo it.

    ``phase``: what the run is called when it is no training step. ``under`` gives the context to
    run in, entered inside the isolation. ``look``: called with each op before it runs, and what it
    returns with the op's result. ``batch`` replaces the recorded one. What the run raises is in
    the recording. Compiled code runs eagerly. Synchronises the device at the end.
    """
    with _begun(step, under, update=update):
        named = known_tensors(step, micro)
        called: Phase = "optimizer" if update else phase
        recorder = Recorder(step.view.root, named, phase=called, look=look)
        loss, error = _run(step, micro, recorder, update=update, batch=batch)
        judged = _judged(step, loss, update=update)
        return Recording(
            micro=micro,
            loss=loss,
            error=error,
            failed={name: recorder.values(judged[name]) for name in nonfinite(judged)},
            loss_values=recorder.values(loss) if loss is not None else (),
            trace=recorder.finish(),
            grads=gradients_of(step.view.root) if keep_grads else {},
        )


def look_again(
    step: Step,
    micro: int,
    *looks: Look,
    update: bool = False,
    batch: Batch | None = None,
    until: int | None = None,
) -> tuple[tuple[str, ...], Exception | None]:
    """Run what ``record`` ran once more, undone, and have ``looks`` see its ops, up to the one
    numbered ``until``; return what failed and what it raised.
    """
    return run_under(step, micro, SecondRun(*looks, until=until), update=update, batch=batch)


def run_under(
    step: Step,
    micro: int,
    mode: TorchDispatchMode,
    *,
    update: bool = False,
    batch: Batch | None = None,
) -> tuple[tuple[str, ...], Exception | None]:
    """Run what ``record`` ran under ``mode``, undone; return what failed and what it raised."""
    with _begun(step, nullcontext, update=update):
        loss, error = _run(step, micro, mode, update=update, batch=batch)
        return nonfinite(_judged(step, loss, update=update)), error


def outcome(step: Step, micro: int, *looks: Look) -> tuple[int, ...] | None:
    """Return checksums of the loss and of every gradient that a micro-batch gives while ``looks``
    see its ops, undone; None where it raises, or gives what is not dense. Synchronises the device.
    """
    with _begun(step, nullcontext, update=False):
        loss, error = _run(step, micro, SecondRun(*looks), update=False)
        given = list(_judged(step, loss, update=False).values())
        if error is not None or not all(map(is_plain, given)):
            return None
        return tuple(checksums(given))


def first_ops(step: Step) -> tuple[Op, ...]:
    """Return the operations of a step's first micro-batch, undone. Raises what it raises."""
    return record(step, 0).whole_trace().ops


def first_loss(step: Step, mode: AbstractContextManager[Any]) -> float:
    """Return the loss of a step's first micro-batch in a context, undone. Raises what it raises.

    Without its backward, unless the run needs one; ``mode`` is entered anew then.
    """
    try:
        with step.isolated(), forward_only(), mode:
            return float(step.run(0).detach())
    except Exception as error:  # a second backward, or a line that reads gradients
        let_go(error)
    with step.isolated(), mode:
        return float(step.run(0).detach())


def gives_its_loss(step: Step) -> bool:
    """Return whether a step's first micro-batch, run again, gives the loss that it gave: a run by
    what was recorded lacks what a script switches between two calls of its models (adapters), and
    says nothing of the run then. Undone; synchronises the device. Raises what the run raises.
    """
    known = step.losses[0] if step.losses else None
    if known is None or known.numel() != 1:
        return True
    share = _COMPILED_LOSS if step.facts.compiled else _SAME_LOSS
    return math.isclose(first_loss(step, nullcontext()), float(known), rel_tol=share)


@contextmanager
def _begun(step: Step, under: Under, *, update: bool) -> Iterator[None]:
    with step.isolated(with_update=update), under(), eager():
        for earlier in range(len(step.batches)) if update else ():
            step.run(earlier)
        yield


def _run(
    step: Step,
    micro: int,
    mode: TorchDispatchMode,
    *,
    update: bool,
    batch: Batch | None = None,
) -> tuple[Tensor | None, Exception | None]:
    with mode:
        try:
            if not update:
                return step.run(micro, batch).detach(), None
            step.update()
        except Exception as error:  # what the run raises is what is being studied
            if lacks_memory(error):
                let_go(error)
                raise ShortOfMemoryError from None
            if isinstance(error, ReachedError):
                clear_frames(error.__traceback__)  # what the run had made until then
            return None, error
    return None, None


def _judged(step: Step, loss: Tensor | None, *, update: bool) -> dict[str, Tensor]:
    """Return what a run gave: its loss and the gradients, or the parameters that its update
    left.
    """
    root = step.view.root
    given = (
        {name: p.detach() for name, p in root.named_parameters()} if update else gradients_of(root)
    )
    return given if loss is None else {"loss": loss} | given
