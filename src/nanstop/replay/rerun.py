"""The failing micro-batch once more:
without instruments first, so that fidelity is measured and never assumed.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from nanstop.errors import ShortOfMemoryError
from nanstop.numerics import accelerator
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.parked import ParkedTensors
from nanstop.numerics.room import let_go
from nanstop.numerics.tensors import floats, has_bad, in_float64, nonfinite
from nanstop.numerics.update_length import is_ruinous
from nanstop.records import Fidelity, Finiteness, Replay
from nanstop.replay.conditions import Under, eager, inside_transform, is_compiling
from nanstop.replay.function_modes import FunctionMode
from nanstop.replay.step import Batch, Step, gradients_of, update_undone

_FEWEST = 2
"""Runs that are held against each other."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One undone run. ``bad``: "loss", names of parameters with a bad gradient ("grad:NAME") or
    value ("param:NAME").

    ``grads``: the gradients by parameter name (kept on the device) where they were asked for.
    ``peak_bytes``: what was in use at the most, without copies of what is undone.
    ``lengths``: how far the update moved each of the parameters that were to be judged by that.
    ``strayed``: of a run on another's path, see ``Path``.
    """

    loss: float | None
    bad: tuple[str, ...]
    error: BaseException | None
    digest: str
    seconds: float
    grads: Mapping[str, Tensor] | None = None
    peak_bytes: int | None = None
    lengths: Mapping[str, float] = field(default_factory=dict)
    strayed: str = ""

    @property
    def failed(self) -> bool:
        """Whether a value was not finite or an exception was raised."""
        return bool(self.bad) or self.error is not None

    @property
    def lacked_memory(self) -> bool:
        """Whether it ended for want of memory, which says nothing of what it computes."""
        return lacks_memory(self.error)


def attempt(  # noqa: PLR0913 - a run, and what is to be known of it, by name
    step: Step,
    micro: int,
    *,
    batch: Batch | None = None,
    update: bool = False,
    window: bool = False,
    keep_grads: bool = False,
    in_float32: Mapping[str, float] | None = None,
    under: Under = nullcontext,
    along: Under = nullcontext,
    gathered: Callable[[nn.Module], Mapping[str, Tensor]] = gradients_of,
) -> Attempt:
    """Run a micro-batch (with ``window``: all of them;
    with ``update``: and the optimizer update) and undo it bitwise.

    ``under`` gives the context to run in, entered inside the isolation; ``along`` one for forward
    and backward alone (a ``Path`` that is recorded or played). ``in_float32``: how far the
    update should move parameters, by name; one that is moved out of all proportion to it is bad.
    ``gathered``: how its gradients are had. Synchronises the device. Raises nothing but
    ``KeyboardInterrupt`` and the like: what the loss raises is in ``error``.
    """
    began = time.perf_counter()
    loss: Tensor | None = None
    error: BaseException | None = None
    lengths: dict[str, float] = {}
    with _isolated(step, update=update) as peak, under():
        try:
            with along():
                if update or window:
                    for place in range(len(step.batches)):
                        loss = step.run(place)
                else:
                    loss = step.run(micro, batch)
            grads = gathered(step.view.root)
            bad = _bad(loss, grads)
            if keep_grads and update:  # which may clip them in place
                grads = {name: grad.detach().clone() for name, grad in grads.items()}
            if update and not bad:
                lengths, bad = _updated(step, in_float32 or {})
        except Exception as raised:  # what the run raises is what is being studied
            error, grads, bad = raised, {}, ()
            if lacks_memory(raised):
                loss = None
                let_go(raised)
        digest = _digest(loss, grads, error)
    return Attempt(
        loss=float(loss) if loss is not None and loss.numel() == 1 else None,
        bad=bad,
        error=error,
        digest=digest,
        seconds=time.perf_counter() - began,
        grads=grads if keep_grads else None,
        peak_bytes=peak(),
        lengths=lengths,
    )


@contextmanager
def _isolated(step: Step, *, update: bool) -> Iterator[Callable[[], int | None]]:
    """Undo on exit what runs inside; yield what says how many bytes were in use at the most on a
    device that keeps account, without the copies of what is undone.
    """
    device = accelerator.in_use()
    measured = hasattr(device, "max_memory_allocated")
    if measured:
        device.reset_peak_memory_stats()
    held = device.memory_allocated() if measured else 0
    with update_undone(step) if update else step.isolated():
        copied = device.memory_allocated() - held if measured else 0
        yield lambda: device.max_memory_allocated() - copied if measured else None


def note_compiled(step: Step) -> None:
    """Have a step know whether it calls compiled code. Undone. Its window runs up to the first such
    call: what is made to be looked into is none that any code was compiled for.

    Errors: ``NanstopError`` where the window cannot be run again.
    """
    if step.facts.compiled or not is_compiling():
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        met = attempt(step, 0, window=True)
    if "fail_on_recompile" in str(met.error):
        step.learned(compiled=True)


def communicates(step: Step) -> str:
    """Return the first operation of a window's forwards and backwards that needs other processes
    and was not made with them before, or "". Undone.

    Errors: ``NanstopError`` where the window cannot be run again.
    What its loss raises does not matter here.
    """
    step.collectives.stopped = ""
    with step.isolated():
        for micro in range(len(step.batches)):
            # What it raises is the operation that was stopped, or the failure itself.
            with suppress(Exception):
                step.run(micro)
            if step.collectives.stopped:
                break
    return step.collectives.stopped


def _updated(
    step: Step, in_float32: Mapping[str, float]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Apply the update of a window; return how far it moves the parameters of ``in_float32``, and
    what it ruins: those that are moved out of all proportion, and all that are not finite.
    """
    before = {name: p.clone() for name, p in _parameters(step) if name in in_float32}
    step.update()
    now = dict(_parameters(step))
    moved = {name: float((now[name].float() - old.float()).norm()) for name, old in before.items()}
    long = [name for name, true in in_float32.items() if is_ruinous(moved[name], true)]
    return moved, tuple(f"param:{name}" for name in dict.fromkeys((*nonfinite(now), *long)))


def _parameters(step: Step) -> list[tuple[str, Tensor]]:
    return [(name, p.detach()) for name, p in step.view.root.named_parameters() if p.requires_grad]


def _bad(loss: Tensor | None, grads: Mapping[str, Tensor]) -> tuple[str, ...]:
    bad = grads.nonfinite() if isinstance(grads, ParkedTensors) else nonfinite(grads)
    names = tuple(f"grad:{name}" for name in bad)
    if loss is not None and has_bad(loss):
        return ("loss", *names)
    return names


def _digest(loss: Tensor | None, grads: Mapping[str, Tensor], error: BaseException | None) -> str:
    """Return a digest of the loss and of each gradient's norm and sum, bit for bit;
    or of what was raised. Gradients that wait elsewhere are long on the way, and not in it.
    """
    if error is not None:
        return hashlib.sha256(f"{type(error).__name__}: {error}".encode()).hexdigest()[:16]
    scalars = [in_float64(loss.detach().sum())] if loss is not None else []
    present = () if isinstance(grads, ParkedTensors) else grads.values()
    for part in (part for grad in present for part in floats(grad)):
        scalars += [in_float64(torch.linalg.vector_norm(part)), in_float64(part.sum())]
    return _hashed(scalars)


def _hashed(scalars: Sequence[Tensor]) -> str:
    """Return a digest of float64 scalars, every NaN the same;
    "" where none is finite, so that all would look alike.
    """
    values = torch.stack([s.to(scalars[0].device) for s in scalars]).tolist() if scalars else []
    if not any(map(math.isfinite, values)):
        return ""
    packed = b"".join(b"nan" if math.isnan(v) else struct.pack("<d", v) for v in values)
    return hashlib.sha256(packed).hexdigest()[:16]


def rerun(
    step: Step,
    micro: int,
    *,
    incident: str,
    first_loss: Tensor | None,
    raised: bool = False,
    times: int = 3,
    update: bool = False,
    in_float32: Mapping[str, float] | None = None,
) -> Replay:
    """Return how faithfully the failing micro-batch fails again, unmodified.

    bitwise: every run has the same digest and the loss that training saw. same_failure: it fails
    each time, with other bits, or nothing of it is finite that could be compared. different:
    sometimes. not_reproduced: never. All but the first run note what modules return, for of losses
    and gradients that are all NaN one is as another. ``in_float32``: see ``attempt``. A run that
    memory was too short for is not counted. Errors: ``ShortOfMemoryError`` where two did not fit.
    """
    notes = [_ModuleOutputs() for _ in range(times - 1)]
    conditions = (nullcontext, *(note.taken for note in notes))
    runs = [
        attempt(step, micro, update=update, in_float32=in_float32, under=under)
        for under in (conditions if not step.facts.compiled else (nullcontext,) * times)
    ]
    if not raised and any(run.lacked_memory for run in runs):
        ended = [not run.lacked_memory for run in runs]
        if sum(ended) < min(times, _FEWEST):
            raise ShortOfMemoryError
        runs, notes = list(compress(runs, ended)), list(compress(notes, ended[1:]))
    seen = None if first_loss is None or first_loss.numel() != 1 else float(first_loss)
    same_loss = update or seen is None or _same_number(seen, runs[0].loss)
    # What Python code raised is raised by no replay: its number is what was met.
    is_as_met = same_loss and (seen is not None or raised == (runs[0].error is not None))
    fidelity = _fidelity(runs, {note.digest() for note in notes}, is_as_met=is_as_met)
    unsteady = fidelity in ("not_reproduced", "different")
    return Replay(
        incident=incident,
        fidelity=fidelity,
        runs=len(runs),
        num_failed=sum(run.failed for run in runs),
        private_rng=unsteady and _draws_privately(step, micro, update=update),
        loss=runs[0].loss,
        digest=runs[0].digest,
        eager=_eager(step, micro, update=update),
        seconds=sum(run.seconds for run in runs),
        note=getattr(step, "condition", ""),
    )


def _fidelity(runs: Sequence[Attempt], within: Collection[str], *, is_as_met: bool) -> Fidelity:
    """Return how alike runs of one failure are;
    ``within``: the digests of what modules returned.
    """
    num_failed, digests = sum(run.failed for run in runs), {run.digest for run in runs}
    if num_failed < len(runs):
        return "different" if num_failed else "not_reproduced"
    same_bits = len(digests) == len(within) == 1
    comparable = digests != {""} or within != {""}
    return "bitwise" if same_bits and comparable and is_as_met else "same_failure"


class _ModuleOutputs:
    """Notes a digest of what each module returns, of its finite values.
    Not of compiled code, which calls no module.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Note what is returned inside. No device synchronisation; a pass over each output."""
        handle = register_module_forward_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def digest(self) -> str:
        """Return the digest. Synchronises the device."""
        return _hashed(self._sums)

    def _note(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if inside_transform():
            return
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            finite = torch.nan_to_num(first.detach(), nan=0.0, posinf=0.0, neginf=0.0)
            self._sums.append(in_float64(finite.sum(dtype=torch.float32)))


class _Draws(FunctionMode):
    """Looks for calls that are given a random generator other than torch's own, which a replay
    cannot put back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.private = False

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = kwargs.get("generator")
        self.private |= given is not None and given is not torch.default_generator
        return func(*args, **kwargs)


def _draws_privately(step: Step, micro: int, *, update: bool) -> bool:
    """Return whether the step draws from a generator of the run's own. Runs it once more;
    compiled code is not looked into.
    """
    draws = _Draws()
    if not step.facts.compiled:
        attempt(step, micro, update=update, under=lambda: draws)
    return draws.private


def _same_number(first: float, second: float | None) -> bool:
    return second is not None and (first == second or (math.isnan(first) and math.isnan(second)))


def _eager(step: Step, micro: int, *, update: bool) -> Finiteness:
    """Return whether the step is finite with compiled code switched off;
    unknown where nothing is compiled.
    """
    if not step.facts.compiled or update:
        return "unknown"
    return "nonfinite" if attempt(step, micro, under=eager).failed else "finite"
