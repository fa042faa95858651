"""Which line of Python writes to memory where torch dispatches nothing: a kernel of Triton or CUDA
that is launched by hand, an extension in C++, NumPy.

A second run looks at the memory after each line that runs from the operation that took it on. That
synchronises the device at every line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from nanstop.frozen import frozen
from nanstop.numerics.tensors import bad_mask, is_measurable, measure, tensors
from nanstop.own_code import is_wrapper
from nanstop.records import Finiteness, TensorStats
from nanstop.tracing import operators
from nanstop.tracing.operators import outputs_of
from nanstop.tracing.places import Line
from nanstop.tracing.source.holders import RUN

_MAX_LOOKS = 4000
_EVENTS = ("line", "return", "exception")


@frozen
class HiddenWrite:
    """A write that no operation makes. ``at``: how many looks at the memory went before it.
    ``written``: what the memory holds behind it, ``read``: the floating-point tensors that the
    function it happens in holds when its line begins, with ``writers``: of each, the index of the
    operation that wrote it last.
    """

    at: int
    line: Line
    written: tuple[TensorStats, ...] = ()
    read: tuple[TensorStats, ...] = ()
    writers: tuple[int | None, ...] = ()


class WriteWatch:
    """A look that watches the memory which one operation, by its index, has left finite.

    All memory that operations take and do not write is filled with ones: what another tensor has
    left there says nothing. Run again with ``at`` of a write that was found, ``found`` holds all of
    it; with ``ordinary``, what the line reads is put at ordinary numbers while it runs, and
    ``outcome`` is whether the memory is finite behind it.
    """

    def __init__(self, taken: int, *, at: int | None = None, ordinary: bool = False) -> None:
        self.found: HiddenWrite | None = None
        self.outcome: Finiteness = "unknown"
        self._taken, self._at, self._ordinary = taken, at, ordinary
        self._memory: list[Tensor] = []
        self._frames: list[FrameType] = []
        self._looks = 0
        self._line: Line = None
        self._writers: dict[int, int] = {}
        self._unwritten: set[int] = set()
        self._before: HiddenWrite | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._stop: Callable[[], None] | None = None

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None]:
        traits = operators.traits(func)

        def done(result: Any) -> None:
            written = [t for _, t in operators.written(traits, args, kwargs, result)]
            for tensor in written:
                self._note(tensor, index, is_taken=traits.uninitialised)
            if index == self._taken:
                self._begin(outputs_of(func, args, kwargs, result))
            elif self._stop is not None and self._is_in(written) and self._is_bad():
                self.stop()  # an operation has written it
            elif self._stop is not None and self._before is not None:
                self._made(index, written)

        return done

    def end(self) -> None:
        """Let go of all that was watched, once the run is over."""
        with _apart():
            self.stop()
        for frame in self._frames:
            if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
                # A copy of its variables that a frame keeps would hold tensors (PEP 667).
                frame.f_locals.clear()
        self._frames = []

    def stop(self) -> None:
        """Watch no more."""
        if self._stop is not None:
            self._stop()
            self._stop = None
        self._put_back()

    def _note(self, tensor: Tensor, index: int, *, is_taken: bool) -> None:
        memory = tensor.untyped_storage()._cdata
        self._writers[memory] = index
        self._unwritten.discard(memory)
        if is_taken and is_measurable(tensor):
            self._unwritten.add(memory)
            with torch.no_grad():
                tensor.fill_(1)

    def _made(self, index: int, written: Sequence[Tensor]) -> None:
        """Count what an operation makes in the line itself, and is bad, as read by it."""
        bad = [one for one in written if is_measurable(one) and bool(bad_mask(one).any())]
        before = self._before
        if bad and before is not None:
            read = (*before.read, *map(measure, bad))
            writers = (*before.writers, *(index for _ in bad))
            self._before = replace(before, read=read, writers=writers)

    def _begin(self, outputs: Sequence[Tensor]) -> None:
        self._memory = [one.detach() for one in outputs if is_measurable(one)]
        frames = list(_frames())
        if not self._memory or not frames or self._is_bad():
            return
        self._frames = frames
        self._stop = _traced(frames, self._event)
        self._next(frames[0])

    def _event(self, frame: FrameType, event: str, _arg: Any) -> Any:
        """Look at the memory between two lines; Python calls this in the thread that runs them."""
        try:
            if self._stop is not None and event in _EVENTS:
                self._looked(frame, event)
        except Exception:  # out of memory, say: nothing is found, and the run goes on
            self.stop()
        return self._event if self._stop is not None else None

    def _looked(self, frame: FrameType, event: str) -> None:
        with _apart():
            if self._is_bad():
                self._met()
            elif self._at is not None and self._looks > self._at:
                self._passed()
            elif self._looks >= _MAX_LOOKS:
                self.stop()
            else:
                upper = next(_nearest(frame.f_back), None) if event == "return" else frame
                self._next(upper)

    def _next(self, frame: FrameType | None) -> None:
        """Note where the script is, before what runs next."""
        self._line = None if frame is None else (frame.f_code, frame.f_lineno)
        if self._looks == self._at and frame is not None:
            read = self._read_in(frame)
            writers = tuple(self._writers.get(one.untyped_storage()._cdata) for one in read)
            stats = tuple(map(measure, read))
            self._before = HiddenWrite(self._looks, self._line, (), stats, writers)
            for one in read if self._ordinary else ():
                self._kept.append((one, one.clone()))
                one.copy_(_ordinary(one))
        self._looks += 1

    def _met(self) -> None:
        at = self._looks - 1
        before = self._before
        if before is not None and before.at == at:
            written = tuple(map(measure, self._memory))
            self.found = HiddenWrite(at, before.line, written, before.read, before.writers)
        elif self._at is None:
            self.found = HiddenWrite(at, self._line)
        if at == self._at and self._kept:
            self.outcome = "nonfinite"
        self.stop()

    def _passed(self) -> None:
        if self._kept:
            self.outcome = "finite"
        self.stop()

    def _put_back(self) -> None:
        for tensor, kept in self._kept:
            tensor.copy_(kept)
        self._kept.clear()

    def _is_bad(self) -> bool:
        return any(bool(bad_mask(one).any()) for one in self._memory)

    def _is_in(self, written: Sequence[Tensor]) -> bool:
        own = {one.untyped_storage()._cdata for one in self._memory}
        return any(one.untyped_storage()._cdata in own for one in written)

    def _read_in(self, frame: FrameType) -> list[Tensor]:
        """Return the floating-point tensors in a function's variables, each memory once, without
        what is written.
        """
        known = {one.untyped_storage()._cdata for one in self._memory}
        found: list[Tensor] = []
        for tensor in tensors(list(frame.f_locals.values())):
            if not is_measurable(tensor) or not tensor.is_floating_point():
                continue
            memory = tensor.untyped_storage()._cdata
            if memory not in known and not self._is_taken_alone(tensor):
                known.add(memory)
                found.append(tensor.detach().data)
        return found

    def _is_taken_alone(self, tensor: Tensor) -> bool:
        """Return whether nothing has been written yet to the memory of a tensor."""
        return tensor.untyped_storage()._cdata in self._unwritten and bool((tensor == 1).all())


def _ordinary(like: Tensor) -> Tensor:
    """Return numbers between 0.25 and 0.75 that differ from each other, in the format of ``like``:
    what a logarithm, a root, a division and a product all have a value for.
    """
    steps = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return (0.25 + (steps * 0.618034) % 1.0 / 2).view(like.shape).to(like.dtype)


@contextmanager
def _apart() -> Iterator[None]:
    """Run operations that no mode is to see or to count."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _frames() -> Iterator[FrameType]:
    """Yield the running frames of the recorded run whose lines somebody wrote, innermost first."""
    return _nearest(sys._getframe(1))


def _nearest(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code.co_filename != RUN:
        if not is_wrapper(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _traced(frames: Sequence[FrameType], event: Any) -> Callable[[], None]:
    """Have Python call ``event`` before each line of some running functions; return what ends
    that.
    """
    earlier, own, over = sys.gettrace(), [frame.f_trace for frame in frames], False

    def called(*_: Any) -> None:
        if over:  # ended by another thread, which cannot end it here
            sys.settrace(earlier)

    def end() -> None:
        nonlocal over
        over = True
        for frame, one in zip(frames, own, strict=True):
            frame.f_trace = one
        if sys.gettrace() is called:
            sys.settrace(earlier)

    for frame in frames:
        frame.f_trace = event
    sys.settrace(called)
    return end
