"""What a window's reading, an exception or the weights say: nothing, or an alarm.
The same for every host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from nanstop.decide.apart import ByItself
from nanstop.detect.sentinel import Reading, tally_gradients
from nanstop.frozen import frozen
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.weights import MAX_LISTED
from nanstop.records import Phase, Signal, SignalSource, SourceLine, StepId, TensorStats
from nanstop.replay.conditions import end_checkpoints
from nanstop.replay.step import ModelView, Step, parameters_of, trainable_of
from nanstop.tracing.places import Line, raised_line, source_line

_MAX_NAMED = 8
"""Names of one kind that a report lists; the first bad ones say as much as hundreds."""
_MAX_MESSAGE = 2000


@frozen
class Alarm:
    """A failure as it is noticed. ``bad_params`` and ``bad_state`` were bad before this step's
    forward, ``broken`` are parameters that are bad now. ``harmless``: all that the step leaves is
    finite, its gradients and buffers, so that an infinite constant in the loss may be all there
    is. ``rewritten_at``: lines of the script that have written to the gradients since their
    backward, as far as they are known; None where none has. ``no_redo``, ``is_past``: see
    ``decide``; ``by_itself``: ``decide_apart``. ``interrupt``: from the user, before its
    investigation.
    """

    signals: tuple[Signal, ...]
    phase: Phase
    error: BaseException | None = None
    bad_params: tuple[str, ...] = ()
    bad_state: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    harmless: bool = False
    rewritten_at: tuple[SourceLine, ...] | None = None
    no_redo: str = ""
    is_past: bool = False
    by_itself: ByItself = ""
    interrupt: KeyboardInterrupt | None = None


def alarm_of_reading(
    step: Step, reading: Reading, are_buffers_spoilt: Callable[[], bool] = lambda: False
) -> Alarm | None:
    """Return what is wrong with a window, or None: an infinite norm of finite gradients is no
    failure of any of them. ``are_buffers_spoilt``: whether it has left in a buffer what is not
    finite; asked where a loss is not.

    The phase is where the first sign was seen; an investigation says itself where the failure was
    born. Where something is wrong it synchronises the device several times.
    """
    found = None if reading.quiet else _found_in(step, reading, are_buffers_spoilt)
    if found is not None and step.facts.is_updated_inside:
        # By now the step's own update may have made them bad.
        return replace(found, bad_params=(), bad_state=())
    return found


def _found_in(step: Step, reading: Reading, are_buffers_spoilt: Callable[[], bool]) -> Alarm | None:
    seen = micros_read(step)
    signals: tuple[Signal, ...] = tuple(
        Signal(
            source="loss",
            name="loss",
            value=reading.losses[place],
            at=replace(step.id, micro=seen[place]),
        )
        for place in reading.bad_losses
    )
    gradients = {name: p.grad for name, p in parameters_of(step.view).items()}
    bad = nonfinite(gradients)
    if signals:
        left = bad or are_buffers_spoilt()
        found = alarm(step.view, step.id, signals, "forward")
        return replace(found, harmless=not left and not reading.found_inf)
    if not bad:
        return None
    first, *others = _named("grad", bad, step.id, reading.norm)
    first = replace(first, gradients=tally_gradients(gradients.values()))
    return alarm(step.view, step.id, (first, *others), "backward")


def arrived(step: Step) -> Alarm:
    """Return the alarm for gradients that are not finite in a window of finite losses: what another
    process sent, has for itself, or the exchange with it. Synchronises the device.
    """
    gradients = {name: p.grad for name, p in parameters_of(step.view).items()}
    signals = _named("grad", nonfinite(gradients), step.id)
    elsewhere = Signal(source="grad", message="what another process has of it", at=step.id)
    return alarm(step.view, step.id, signals or (elsewhere,), "backward")


def micros_read(step: Step) -> tuple[int, ...]:
    """Return the micro-batches that the losses of a window's reading are of, in order."""
    return tuple(micro for micro, loss in enumerate(step.losses) if loss is not None)


def alarm_of_exception(
    view: ModelView, at: StepId, error: BaseException, phase: Phase, line: Line = None
) -> Alarm:
    """Return the alarm for an exception with a numeric signature, whose checkpoints are ended: the
    step will be run again. ``line``: that of the script which it went through, where its traceback
    does not say so. Synchronises the device.
    """
    end_checkpoints(error)
    name, message = type(error).__name__, str(error)[:_MAX_MESSAGE]
    raised_at = source_line(line or raised_line(error))
    signal = Signal(source="exception", name=name, message=message, at=at, raised_at=raised_at)
    if "device-side assert" in message or "CUDA error" in message:
        # The CUDA context is gone: asking any tensor anything raises again.
        return Alarm((signal,), phase, error)
    return alarm(view, at, (signal,), phase, error)


def alarm_of_weights(
    view: ModelView, at: StepId, odd: Iterable[TensorStats], before: Collection[str]
) -> Alarm | None:
    """Return whether trainable parameters, of which ``odd`` stand out, are bad that were not so
    ``before``.
    """
    odd = tuple(odd)
    if len(odd) < MAX_LISTED and all(stats.finite for stats in odd):
        return None
    trained = trainable_of(view).parameters
    bad = nonfinite({name: p for name, p in trained.items() if name not in before})
    return alarm(view, at, _named("param", bad, at), "optimizer") if bad else None


def alarm(
    view: ModelView,
    at: StepId,
    signals: tuple[Signal, ...],
    phase: Phase,
    error: BaseException | None = None,
) -> Alarm:
    """Return an alarm with what is bad in the weights and the optimizer's state beside it.
    Synchronises the device.
    """
    params = nonfinite(dict(view.root.named_parameters()))
    state = nonfinite(trainable_of(view).state_tensors())
    if not any(signal.source == "param" for signal in signals):
        signals += _named("param", params, at)
    return Alarm(signals + _named("state", state, at), phase, error, params, state, params)


def _named(
    source: SignalSource, names: tuple[str, ...], at: StepId, value: float | None = None
) -> tuple[Signal, ...]:
    more = f"and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return tuple(
        Signal(source=source, name=name, value=value, message=more, at=at)
        for name in names[:_MAX_NAMED]
    )
