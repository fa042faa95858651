"""Whether the backward of an ``autograd.Function`` hears what it is given.

What stands behind a function weighs its results: with a mask, a number a sample, a scale. A
backward that gives the same whatever it is given trains on other weights. That is tried on the
function itself, when the micro-batch is run again, with other numbers in the place of all but the
first that it is given, or of the one. It is told where its forward, by differences, says something
else than what it gave. A straight-through or reversed gradient is none of its forward's, and hears
what it is given.

Gradients that are asked for on the way to a loss are to be heard as well. They change what is
trained, as an adaptive weight or an adversarial input does, or are a penalty, with a graph of their
own. A part of the loss that has none is told by larger ones: the loss is another one, and every
gradient of a weight is the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function

from nanstop.own_code import is_class_of
from nanstop.records import BackwardRow, ObjectiveRow
from nanstop.replay.conditions import eager, unrecorded
from nanstop.replay.function_modes import FunctionMode
from nanstop.replay.rng import rng_kept
from nanstop.replay.step import gradients_of
from nanstop.replay.undo import NOTHING
from nanstop.tracing.op_patches import LookOfSome
from nanstop.tracing.places import line_text, user_line

if TYPE_CHECKING:
    from nanstop.replay.step import Step
    from nanstop.tracing.places import Line

MOST_GRAPHS, MOST_NODES = 64, 1 << 16
_APART = 0.2
"""Of the larger gradient, by which that which was given and that of the forward differ at least."""
_STRAIGHT = 0.05
"""Of slopes, by which they may be others over half the distance."""
_FAR = 1e-2
"""Of the size of an operand, the distance over which a slope is taken."""
_NUM_DIRECTIONS = 8
_LARGER = 1.5
"""Times which gradients are handed out."""
_COUNTS = 1e-4
"""Of a loss, by which it changes at least."""


class Backwards(LookOfSome):
    """Keeps the functions whose backward is deaf."""

    in_backward = True

    def __init__(self) -> None:
        self.deaf: dict[type[Function], None] = {}
        self._graphs: set[int] = set()

    @property
    def are_several(self) -> bool:
        """Whether more than one graph was gone through: gradients may have been asked for before
        the loss, and a checkpoint has a graph of its own.
        """
        return len(self._graphs) > 1

    def __call__(
        self, _index: int, _func: Any, _args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        graph = torch._C._current_graph_task_id()
        # A forward may have gradients of its own, and checkpoints have one graph each.
        if graph not in self._graphs and len(self._graphs) < MOST_GRAPHS:
            self._graphs.add(graph)
            for node in _functions(torch._C._current_autograd_node()):
                node.register_hook(partial(self._asked, ref(node)))
        return None

    def _asked(self, node: Any, made: Any, given: Any) -> None:
        """Ask a backward once more, right after the run has asked it."""
        live = node()
        if live is None or len(given) != 1:
            return
        with suppress(Exception), unrecorded(), torch.no_grad(), rng_kept():
            others = _others(given[0])
            if others is None:
                return
            before = [one.clone() for one in _tensors(made)]
            after = _tensors(live._forward_cls.backward(live, others))
            if before and any(bool(one.any()) for one in before) and _alike(before, after):
                self.deaf[live._forward_cls] = None


def _functions(node: Any) -> Iterator[Any]:
    """Yield the nodes of a graph that are functions of somebody, torch's own left out."""
    seen, open_nodes = {node}, [node]
    while open_nodes and len(seen) < MOST_NODES:
        one = open_nodes.pop()
        if isinstance(one, BackwardCFunction):
            known: Any = one
            if not is_class_of(known._forward_cls, "torch"):
                yield known
        new = {n for n, _ in one.next_functions if n is not None} - seen
        seen |= new
        open_nodes += new


def _others(given: Any) -> Tensor | None:
    """Return other numbers for all but the first of several, of either sign, within those that
    there are; for one number, or the same everywhere, one of the other sign. None where it is 1, or
    not finite: nothing is weighed.
    """
    if not isinstance(given, Tensor) or not given.numel() or not given.is_floating_point():
        return None
    low, high = torch.aminmax(given.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        return None
    if bool(low == high):
        return None if float(low) in (0.0, 1.0) else -2.0 * given
    far = given.abs().max()
    numbers = torch.linspace(-1.0, 1.0, given.numel(), device=given.device).to(given.dtype)
    other = (far * numbers).reshape(given.shape).clone()
    other.view(-1)[:1] = given.reshape(-1)[:1]
    return other


def _tensors(made: Any) -> list[Tensor]:
    entries = made if isinstance(made, tuple) else (made,)
    return [one for one in entries if isinstance(one, Tensor)]


def _alike(first: list[Tensor], second: list[Tensor]) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(torch.equal(one, other) for one, other in pairs)


def backward_rows(step: Step, found: Backwards) -> tuple[BackwardRow, ...]:
    """Return the functions whose backward is deaf and gives something else than their forward has.

    Undone bitwise; runs the first micro-batch again for each that may be one, and not at all where
    none is. Synchronises the device.
    """
    rows = [row for kind in found.deaf if (row := _measured(step, kind)) is not None]
    return tuple(rows)


def _measured(step: Step, kind: Any) -> BackwardRow | None:
    calls = _Calls(kind)
    with step.isolated(), calls.noted():
        step.run(0)
    code = getattr(kind.backward, "__code__", None)
    last = max((line for *_, line in code.co_lines() if line), default=0) if code else 0
    for call in calls.found:
        if call.apart is not None and call.apart > _APART:
            return BackwardRow(
                name=kind.__name__,
                num=call.num,
                apart=call.apart,
                line=line_text((code, last)) if code is not None else "",
            )
    return None


class _Call:
    """One call of a function. ``apart``: how far the gradient that it gave is from that of its
    forward, as a share; None where that cannot be told.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
        self.apart: float | None = None
        self.num = 0


class _Calls:
    """Notes the calls of one function while it is ``noted``."""

    def __init__(self, kind: Any) -> None:
        self.found: list[_Call] = []
        self._kind = kind
        self._open: dict[int, _Call] = {}
        self._forward, self._backward = kind.forward, kind.backward
        self._has_setup = kind.setup_context is not Function.setup_context

    @contextmanager
    def noted(self) -> Iterator[None]:
        names = ("setup_context" if self._has_setup else "forward", "backward")
        setup = self._kind.setup_context

        def forward(ctx: Any, *args: Any) -> Any:
            self._open[id(ctx)] = _Call(args)
            return self._forward(ctx, *args)

        def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
            self._open[id(ctx)] = _Call(inputs)
            return setup(ctx, inputs, output)

        def backward(ctx: Any, *given: Any) -> Any:
            made = self._backward(ctx, *given)
            call = self._open.get(id(ctx))
            if call is not None and len(given) == 1:
                self.found.append(call)
                with suppress(Exception), unrecorded(), torch.no_grad(), rng_kept():
                    call.num, call.apart = given[0].numel(), self._apart(call, given[0], made)
            return made

        replaced: Any = setup_context if self._has_setup else forward
        before = {name: vars(self._kind).get(name, NOTHING) for name in names}
        setattr(self._kind, names[0], staticmethod(replaced))
        self._kind.backward = staticmethod(backward)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is NOTHING:
                    delattr(self._kind, name)
                else:
                    setattr(self._kind, name, value)

    def _apart(self, call: _Call, given: Tensor, made: Any) -> float | None:
        """Compare slopes along random directions, each value as far as its gradient is large."""
        entries = made if isinstance(made, tuple) else (made,)
        gradients = {
            place: one
            for place, (one, arg) in enumerate(zip(entries, call.args, strict=False))
            if isinstance(one, Tensor) and isinstance(arg, Tensor) and arg.is_floating_point()
            if bool(one.any()) and bool(arg.any())
        }
        draws = torch.Generator().manual_seed(0)
        far, near, said = [], [], []
        for _ in range(_NUM_DIRECTIONS if gradients else 0):
            moved = {
                place: _direction(one, call.args[place], draws) for place, one in gradients.items()
            }
            far.append(self._slope(call, given, moved, 1.0))
            near.append(self._slope(call, given, moved, 0.5))
            said.append(sum(_product(gradients[place], by) for place, by in moved.items()))
        # A result that hangs on nothing is there to bring in gradients that were made elsewhere.
        if not any(near) or math.dist(far, near) > _STRAIGHT * math.hypot(*near):
            return None
        return math.dist(near, said) / max(math.hypot(*near), math.hypot(*said))

    def _slope(
        self, call: _Call, given: Tensor, moved: Mapping[int, Tensor], share: float
    ) -> float:
        """Return by how much what stands behind a call changes, as far as it is given here."""
        ends = []
        for sign in (share, -share):
            args = [
                arg + sign * moved[at] if at in moved else _fresh(arg)
                for at, arg in enumerate(call.args)
            ]
            ctx = () if self._has_setup else (_Context(args),)
            ends.append(_product(self._forward(*ctx, *args), given))
        return (ends[0] - ends[1]) / (2 * share)


def _direction(gradient: Tensor, operand: Tensor, draws: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, gradient.shape, generator=draws).to(gradient.device) * 2 - 1
    size = _FAR * operand.float().norm() / gradient.float().norm()
    return (signs * gradient.abs() * size).to(operand.dtype)


def _product(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other.double()).sum())


def _fresh(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class _Context(SimpleNamespace):
    """Stands in for the context of a call that has no backward."""

    def __init__(self, args: list[Any]) -> None:
        super().__init__(needs_input_grad=tuple(isinstance(a, Tensor) for a in args))

    def _nothing(self, *_: Any) -> None:
        pass

    save_for_backward = mark_dirty = mark_non_differentiable = set_materialize_grads = _nothing


def unheard_rows(step: Step) -> tuple[ObjectiveRow, ...]:
    """Return the line that asks for gradients which change the first micro-batch's loss, and no
    gradient of what is trained.

    Undone bitwise; raises what the step raises. Runs the micro-batch once, and again where it asks
    for any. Synchronises the device.
    """
    plain = _Handed(1.0)
    loss, gradients = _run(step, plain)
    if not plain.lines or not math.isfinite(loss):
        return ()
    other, others = _run(step, _Handed(_LARGER))
    if not abs(other - loss) > _COUNTS * abs(loss):
        return ()
    is_same = gradients.keys() == others.keys() and all(
        torch.equal(one, others[name]) for name, one in gradients.items()
    )
    if not gradients or not is_same:
        return ()
    line = line_text(plain.lines[-1])
    return (ObjectiveRow(op="autograd.grad", module="", given="unheard", width=0, line=line),)


def _run(step: Step, mode: _Handed) -> tuple[float, dict[str, Tensor]]:
    with step.isolated(), eager(), mode:
        loss = float(step.run(0).detach())
        return loss, {name: one.clone() for name, one in gradients_of(step.view.root).items()}


class _Handed(FunctionMode):
    """Hands out gradients that are asked for without a graph of their own, times a factor; keeps
    the lines that ask.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor
        self.lines: list[Line] = []

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func is not torch.autograd.grad or not isinstance(result, tuple):
            return result
        if any(isinstance(one, Tensor) and one.requires_grad for one in result):
            return result
        line = user_line()
        if line not in self.lines:
            self.lines.append(line)
        if self._factor == 1.0:
            return result
        return tuple(one * self._factor if isinstance(one, Tensor) else one for one in result)
