"""Exact numbers where there is no room for a run of the whole model: one region of it, from what
the run itself gave it, or the failing operation alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.errors import ShortOfMemoryError
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.tensors import HALF, in_float64, nonfinite
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.reference.agreement import Gaps, nearness
from nanstop.prove.reference.exact import ExactRuns
from nanstop.prove.reference.ladder import Ladder, Rung
from nanstop.records import Finiteness
from nanstop.remedies.forward import Wrapper, forward_replaced
from nanstop.remedies.given import Given, without_tensors
from nanstop.remedies.precision import computed_anew, computed_in
from nanstop.remedies.streamed import narrow_tensors
from nanstop.replay.conditions import Under, unrecorded
from nanstop.replay.held import swapped
from nanstop.replay.path import Path, place_on_path
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import Batch, gradients_of

_MOST_CALLS = 32


@dataclass(slots=True)
class _Call:
    """One call of a region: what it was given, returned and asked for in the backward."""

    given: Given
    place: tuple[int, int]
    made: list[Tensor] = field(default_factory=list)
    upstream: dict[int, Tensor] = field(default_factory=dict)


class RegionRuns(ExactRuns):
    """Exact numbers of the region that an operation fails in, held against what a whole run of the
    step has there; where there is no room for it either, whether the operation has a value.

    ``wider``: what the operation gives in a wider format, on the operands that it failed on.
    """

    def __init__(self, failing: FailingStep, ladder: Ladder, wider: Finiteness) -> None:
        super().__init__(failing, ladder)
        self._wider: Finiteness = wider
        self._calls: list[_Call] = []
        """Of the last run."""

    def beside(self, failing: FailingStep) -> RegionRuns:
        return RegionRuns(failing, self._ladder, self._wider)

    @property
    def scope(self) -> str:
        is_region = self._ladder.rung is Rung.REGION
        return f"region {self._ladder.region}" if is_region else "operation"

    def of(self, micro: int) -> Attempt:
        """Return the exact run of the region in a micro-batch, from what its own run gives it."""
        if micro not in self._runs:
            run = None
            if self._ladder.rung is Rung.REGION:
                self.attempt(micro, under=_nothing, without_update=True)
                run = self._exact_region(micro)
            if run is None and self._ladder.rung is Rung.REGION:
                self._ladder.step_down()
            self._runs[micro] = run or self._operation()
        return self._runs[micro]

    def _operation(self) -> Attempt:
        """Return the exact run of the operation alone, which its localization has made."""
        if self._wider == "unknown":
            return replace(_ended(()), error=ShortOfMemoryError())
        return _ended(() if self._wider == "finite" else ("operation",))

    def fails_in(self) -> tuple[str, ...]:
        return ("float32",) if self.of(self._failing.micro).bad else ()

    def still_in(self) -> str:
        return ""

    def gaps(self, micro: int, run: Attempt, under: Under) -> Gaps | None:  # noqa: ARG002
        """Return how far what the region gave in the last run is from exact; None where it has no
        gradients to tell, or the run drew other numbers.
        """
        return None if run.failed or run.strayed else self._gaps_of(run, self.path(micro))

    def gaps_of_rows(self, micro: int, batch: Batch) -> Gaps | None:
        path = Path()
        run = self._on(path, micro, batch=batch, under=_nothing, without_update=True)
        return None if run.failed else self._gaps_of(run, path)

    def _gaps_of(self, run: Attempt, path: Path) -> Gaps | None:
        calls = [call for call in self._calls if call.upstream] or self._calls[:1]
        exact = self._run_exactly(path, calls) if self._ladder.rung is Rung.REGION else None
        prefix = f"{self._ladder.region}."
        own = {
            name.removeprefix(prefix): grad
            for name, grad in (run.grads or {}).items()
            if name.startswith(prefix)
        }
        if exact is None or not own:
            return None
        made, grads = exact
        pairs = zip((t for call in calls for t in call.made), made, strict=True)
        gaps = [_squares(mine, true) for mine, true in pairs]
        off, size = (math.sqrt(sum(part)) for part in zip(*gaps, strict=True))
        return off / max(size, 1e-3), *nearness(own, grads)

    def _exact_region(self, micro: int) -> Attempt | None:
        """Return the region's exact run in the last run, which is one of a micro-batch as it is;
        None where there is none, or what it was given is not finite.
        """
        calls = self._calls
        if not calls or any(_bad(call.given.tensors) for call in calls):
            return None
        if any(_bad(call.upstream.values()) for call in calls):
            for call in calls:  # they are the failure's, and nothing to go back from
                call.upstream.clear()
        exact = self._run_exactly(self.path(micro), calls)
        if exact is None:
            return None
        made, grads = exact
        return _ended((*(("region",) if _bad(made) else ()), *nonfinite(grads)))

    def _run_exactly(
        self, path: Path, calls: list[_Call]
    ) -> tuple[list[Tensor], dict[str, Tensor]] | None:
        """Run the region's calls in float32; return what they give and the gradients of its
        parameters. None where memory is short, or it cannot be run so.
        """
        view = self._failing.step.view
        module, narrow = view.root.get_submodule(self._ladder.region), frozenset(HALF)
        made: list[Tensor] = []
        try:
            with ExitStack() as undo:
                undo.enter_context(self._failing.step.isolated())
                undo.enter_context(computed_in(view, narrow, torch.float32))
                undo.enter_context(swapped(narrow_tensors(module).values(), torch.float32))
                undo.enter_context(computed_anew(view))
                undo.enter_context(torch.enable_grad())
                for call in calls:
                    with path.played(choices=self._manner.takes_choices, start=call.place):
                        made += _run_again(call, module.forward)
                return made, {name: grad.clone() for name, grad in gradients_of(module).items()}
        except Exception as error:
            if not lacks_memory(error):
                self._ladder.region = ""  # it cannot be called by itself
            return None

    def _on(self, path: Path, micro: int, *, under: Under, **options: Any) -> Attempt:
        self._calls = []
        inner = partial(self._recorded, under)
        return super()._on(path, micro, under=inner, **options)

    @contextmanager
    def _recorded(self, under: Under) -> Iterator[None]:
        """Note the calls of the region inside, around whatever a context puts there."""
        with under(), ExitStack() as scope:
            if self._ladder.rung is Rung.REGION:
                module = self._failing.step.view.root.get_submodule(self._ladder.region)
                scope.enter_context(forward_replaced(module, _Noting(self._calls)))
            yield


class _Noting(Wrapper):
    """Notes what a region is given, what it returns and what its backward is given."""

    def __init__(self, calls: list[_Call]) -> None:
        self.calls = calls

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.calls) >= _MOST_CALLS:
            return self.inner(*args, **kwargs)
        call = _Call(Given(args, kwargs), place_on_path())
        with unrecorded():
            call.given.tensors = [_copy(tensor) for tensor in call.given.tensors]
        result = self.inner(*args, **kwargs)
        made = [t for t in without_tensors(result)[-1] if _is_float(t)]
        with unrecorded():
            call.made = [tensor.detach().clone() for tensor in made]
        for place, tensor in enumerate(made):
            if tensor.requires_grad:
                tensor.register_hook(partial(_note_gradient, call, place))
        self.calls.append(call)
        return result


def _note_gradient(call: _Call, place: int, gradient: Tensor) -> None:
    with unrecorded():
        call.upstream[place] = gradient.detach().clone()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _run_again(call: _Call, forward: Any) -> list[Tensor]:
    """Call a region in float32 once more, and go back from what it gives as far as the run did;
    return that.
    """
    inputs = [_widened(tensor) for tensor in call.given.tensors]
    made = [t for t in without_tensors(call.given.again(forward, inputs))[-1] if _is_float(t)]
    ends = [(made[i], g.float()) for i, g in call.upstream.items() if made[i].requires_grad]
    if ends:
        torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
    return [tensor.detach() for tensor in made]


def _widened(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float() if tensor.dtype in HALF else tensor.detach()
    return wide.requires_grad_(tensor.requires_grad)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _bad(tensors: Any) -> bool:
    return bool(nonfinite({str(place): tensor for place, tensor in enumerate(tensors)}))


def _squares(own: Tensor, exact: Tensor) -> tuple[float, float]:
    own, exact = in_float64(own), in_float64(exact)
    return float((own - exact).square().sum()), float(exact.square().sum())


def _ended(bad: tuple[str, ...]) -> Attempt:
    return Attempt(loss=None, bad=bad, error=None, digest="", seconds=0.0)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
