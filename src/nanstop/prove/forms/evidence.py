"""What speaks for another form of a line, beside the numbers of an exact run: that it leaves alone
what has a value, and that the loss does not hang on what it puts where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from nanstop.prove.failing_step import FailingStep
from nanstop.prove.forms.revived import NOT_HIDDEN, hides_no_more
from nanstop.prove.reference.agreement import SAME, Gaps, agree, gaps_between, loss_gap
from nanstop.prove.reference.exact import ExactRuns
from nanstop.prove.reference.tolerances import windows_before
from nanstop.records import Atom
from nanstop.records.line_forms import (
    BOUNDED,
    COUNTED,
    FAR,
    FARTHER,
    FINITE,
    KEPT,
    MASK_AFTERWARDS,
    MASK_FAR,
    NUMBERED,
    OFF_ZERO,
    OTHER_BOUND,
    OTHER_COUNT,
    OTHERWISE,
    UNEVEN,
    form_of,
    is_bounded,
)
from nanstop.remedies.apply import applied
from nanstop.remedies.forms.mode import compared, zeros_moved, zeros_noted
from nanstop.replay.conditions import Under
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import ModelView
from nanstop.replay.undo import attributes_kept

_NEAR, _NEAR_GRADIENT = 1e-2, 0.1
"""How far the loss and the gradients' direction, and the worst gradient, under what is typed may be
from those under the form: a clamp ends a little before the edge where a guard begins.
"""

_EQUAL = 1e-10
"""Distance of what float64 gives for the same numbers, added up in another order."""

_FARTHER = 2.0
"""Times the distance without the samples in question: a derivative that is cut off next to a pole
may be a little farther than none.
"""

_STEP = 1e-2
"""How far the number of a weight with the largest gradient is moved."""

_NEARER = (0.5, 0.1, 0.01)
"""Times a weight: a line has the same form whatever the weights are."""

_OFF_ZERO = (1e-3, 1e-4, 1e-5)
"""What is tried in place of 0: near enough to a limit, and far enough for the digits that
differences of numbers near 1 have in float64.
"""

_CONVERGED = 0.02
"""Share of itself, and of its distance to the guard's loss, by which one that has a limit may still
move.
"""

_SEEN = 1e-6
"""Distance of a loss that float64 shows beyond rounding: of one element among many."""

_OTHER = {KEPT: FAR, BOUNDED: OTHER_BOUND, COUNTED: OTHER_COUNT}
_OTHER |= {MASK_AFTERWARDS: MASK_FAR}
_OTHER |= dict.fromkeys(OFF_ZERO, [*OFF_ZERO][-1])
"""The form of a guard that tells whether it matters which number it puts there."""

WHICH_NUMBER = "another finite number gives another loss"
STAYS_ZERO = "what it divides by comes of weights that get no gradient then, and stay as they are"
IN_USE = "steps that pass have numbers beyond the bound"
OTHER_LIMIT = "its value is not the one that the line comes to near there"


def values_unchanged(failing: FailingStep, atoms: tuple[Atom, ...]) -> bool | None:
    """Return whether guards leave alone what has a value and a derivative in the failing
    micro-batch, call by call; None of other remedies, and where nothing has one.
    """
    if not atoms or any(atom.remedy != "form" for atom in atoms):
        return None
    with ExitStack() as scope:
        found = [scope.enter_context(compared(atom)) for atom in atoms]
        failing.attempt(under=nullcontext)
    said = [one.unchanged for one in found if one.unchanged is not None]
    return all(said) if said else None


def bends(exact: ExactRuns, micro: int, formed: Attempt, rest: Attempt, share: float) -> bool:
    """Return whether a form is farther from the exact gradients of a micro-batch than ``rest``, the
    healthy samples alone: what it makes of the others is then worse than nothing. False where the
    exact run fails, too.

    ``share``: of the samples, those that are healthy, as a mean over samples has to be told.
    """
    of_mean = {name: grad * share for name, grad in (rest.grads or {}).items()}
    runs = (formed, rest, replace(rest, grads=of_mean))
    own, *without = (gaps_between(run, exact.of(micro)) for run in runs)
    known = [gaps[2] for gaps in without if gaps is not None]
    return own is not None and bool(known) and own[2] > _FARTHER * max(min(known), SAME)


def moves_loss(
    failing: FailingStep, exact: ExactRuns, atoms: tuple[Atom, ...], run: Attempt
) -> bool:
    """Return whether guards, under which a micro-batch ends as ``run``, give it another loss than
    it has: than its own where only the backward fails, than the exact one, or than another number
    does, where data alone has no value, or where they keep an infinity.
    """
    guards = tuple(atom for atom in atoms if atom.remedy == "form")
    if not guards or run.loss is None:
        return False
    own = exact.attempt(failing.micro, under=nullcontext)
    true = exact.of(failing.micro)
    known = [own.loss, exact.loss_in_float64 if true.failed else true.loss]
    if any(loss_gap(run.loss, loss) > _NEAR for loss in known if loss and math.isfinite(loss)):
        return True
    if misses_limit(failing, exact, guards):
        return True
    under = partial(applied, failing.step.view, with_other_numbers(atoms))
    return not agree(run, exact.attempt(failing.micro, under=under))


def with_other_numbers(atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """Return a cure with the forms that tell whether it matters which numbers its guards put where
    there are none.
    """
    other = {a: _OTHER.get(form_of(a)[0], OTHERWISE) for a in atoms if a.remedy == "form"}
    return tuple(replace(a, value=other[a]) if a in other else a for a in atoms)


def objection(
    failing: FailingStep,
    exact: ExactRuns,
    atoms: tuple[Atom, ...],
    run: Attempt,
    weights: tuple[str, ...] = (),
) -> str:
    """Return what speaks against a form under which the failing micro-batch ends as ``run``,
    whatever its rows say: "" for nothing. ``weights``: those that the failing operation reads,
    where it reads nothing else.
    """
    if not is_any_number(failing, exact, atoms, run):
        return WHICH_NUMBER
    if hides_no_more(failing, exact, atoms, run):
        return NOT_HIDDEN
    guards = tuple(atom for atom in atoms if atom.remedy == "form")
    if not guards or run.failed or run.loss is None:
        return ""
    if is_bounded(guards) and _are_in_use(failing, atoms):
        return IN_USE
    if _stay_zero(failing, exact, atoms, run, weights):
        return STAYS_ZERO
    return OTHER_LIMIT if misses_limit(failing, exact, guards) == "limit" else ""


def _stay_zero(
    failing: FailingStep,
    exact: ExactRuns,
    atoms: tuple[Atom, ...],
    run: Attempt,
    weights: tuple[str, ...],
) -> bool:
    """Return whether weights that the failing operation reads get a gradient of 0 under a form, and
    do so still once an update has moved all others: no step will ever train them.
    """

    def untrained(ended: Attempt) -> list[str]:
        grads = ended.grads or {}
        return [name for name in weights if name in grads and not bool(grads[name].any())]

    if not untrained(run):
        return False
    view = failing.step.view
    with _moved(view, run.grads or {}):
        later = exact.attempt(failing.micro, under=partial(applied, view, atoms))
    return not later.failed and bool(untrained(later))


def _are_in_use(failing: FailingStep, atoms: tuple[Atom, ...]) -> bool:
    """Return whether the last window before is another one within the bounds."""
    earlier = next(windows_before(failing), None)
    under = partial(applied, failing.step.view, atoms)
    return earlier is not None and _unchanged_in(earlier, under) is False


def misses_limit(
    failing: FailingStep, exact: ExactRuns, guards: tuple[Atom, ...]
) -> Literal["", "limit", "data"]:
    """Return whether the loss goes to another number than it has under guards as what is 0 where
    their lines have no value comes near to 0 ("limit"), or to none, though it is of data alone
    ("data"). All in float64: the logarithm of its smallest number is another one. A loss that moves
    little counts where nothing but the divisor itself is 0, and both of its signs lead there.
    """
    if any(form_of(guard)[0] == KEPT for guard in guards) or not exact.may_widen():
        return ""
    with zeros_noted(guards) as by_file:
        exact.attempt(failing.micro, under=nullcontext)
    noted = {file: zeros for file, zeros in by_file.items() if zeros.found}
    if not noted:
        return ""

    def near(by: float) -> float | None:
        @contextmanager
        def under() -> Iterator[None]:
            moved = zeros_moved(noted, by) if by else nullcontext()
            with applied(failing.step.view, guards), moved:
                yield

        return exact.under(failing.micro, under).loss

    found = [near(by) for by in (0.0, *_OFF_ZERO)]
    known = [one for one in found if one is not None and math.isfinite(one)]
    if len(known) < len(found):
        return ""
    gap, off = loss_gap(known[0], known[-1]), abs(known[-1] - known[0])
    if gap <= _NEAR:
        if gap <= _SEEN or not all(zeros.are_divisors for zeros in noted.values()):
            return ""
        below = near(-_OFF_ZERO[-1])
        is_same = below is not None and abs(below - known[-1]) <= _CONVERGED * off
        return "limit" if is_same and _has_limit(*known[1:], off=off) else ""
    if _has_limit(*known[1:], off=off):
        return "limit"
    return "data" if all(zeros.of_data for zeros in noted.values()) else ""


def _has_limit(first: float, second: float, third: float, *, off: float) -> bool:
    """Return whether numbers come to a limit that is ``off`` from another one, by steps that get
    shorter: those of a logarithm are alike.
    """
    size = max(abs(third), _NEAR)
    last = abs(third - second)
    is_shorter = last <= 0.5 * abs(second - first) + SAME * SAME * size
    return is_shorter and last <= _CONVERGED * min(off, size)


def is_any_number(
    failing: FailingStep, exact: ExactRuns, atoms: tuple[Atom, ...], run: Attempt
) -> bool:
    """Return whether another finite number in an infinity's place makes the same of the failing
    micro-batch as ``run``, where that passes: where it does not, no number is the right one.
    """
    numbered = [atom for atom in atoms if atom.remedy in NUMBERED]
    if not numbered or run.failed:
        return True
    for number in (dict(FINITE), *({"0": one} for one in _besides(numbered))):
        others = tuple(
            replace(atom, value=number[form_of(atom)[0]]) if atom.remedy in NUMBERED else atom
            for atom in atoms
        )
        under = partial(applied, failing.step.view, others)
        if not agree(run, exact.attempt(failing.micro, under=under)):
            return False
    return True


def _besides(numbered: list[Atom]) -> tuple[str, ...]:
    """Return what is tried besides in place of 0. A fill takes one number for all places."""
    remedies = {atom.remedy for atom in numbered}
    if "finite_fill" in remedies or any(form_of(atom)[0] != "0" for atom in numbered):
        return ()
    return (*(FARTHER if remedies == {"finite_constant"} else ()), UNEVEN)


def unchanged_elsewhere(failing: FailingStep, exact: ExactRuns, under: Under) -> bool | None:
    """Return whether the last micro-batch before, with the weights of today, keeps loss and
    gradients; or where there is none, the failing one with weights nearer to 0, at which it passes.
    None where it passes with none of them.
    """
    earlier = next(windows_before(failing), None)
    if earlier is not None:
        return _unchanged_in(earlier, under)
    for share in _NEARER:
        with _scaled(failing.step.view, share):
            if not exact.with_and_without(failing.micro, under)[0].failed:
                return exact.is_same_function(failing.micro, under)
    return None


def _unchanged_in(earlier: FailingStep, under: Under) -> bool | None:
    """Return whether a window before keeps loss and gradients; None where it fails."""
    there = ExactRuns(earlier)
    runs = there.with_and_without(earlier.micro, under)
    if runs[0].failed:
        return None
    return agree(*runs) or there.is_same_function(earlier.micro, under)


def is_better_computed(
    failing: FailingStep, exact: ExactRuns, atoms: tuple[Atom, ...], run: Attempt
) -> bool:
    """Return whether a step that no more than float64 can compute as it is, is the same function
    under forms of lines: ``run`` in the run's format, and the same to rounding in float64, in which
    it is the exact one. In log space it may be near to that where that loses digits
    (1 - tanh(x)^2), and the same elsewhere; a guard has to be equal.
    """
    in_log_space = all(atom.remedy == "stable_form" for atom in atoms)
    are_known = all(atom.remedy in ("stable_form", "form") for atom in atoms)
    if exact.dtype is not torch.float64 or not are_known:
        return False
    under = partial(applied, failing.step.view, atoms)
    formed, true = exact.under(failing.micro, under), exact.of(failing.micro)
    if true.failed or not agree(formed, run):
        return False
    if not in_log_space:
        return is_near(gaps_between(formed, true), _EQUAL, _EQUAL)
    if agree(true, formed):
        return True
    return is_near(gaps_between(formed, true)) and bool(unchanged_elsewhere(failing, exact, under))


@contextmanager
def _moved(view: ModelView, grads: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Have all weights moved along their gradients inside, in storages of their own."""
    weights = {n: p for n, p in view.root.named_parameters() if n in grads}
    with attributes_kept((weight, "data") for weight in weights.values()):
        for name, weight in weights.items():
            grad = grads[name].to(weight.dtype)
            largest = grad.abs().amax() if grad.numel() else grad.sum()
            weight.data = weight.data - _STEP * grad / largest.clamp(min=1e-30)
        yield


@contextmanager
def _scaled(view: ModelView, share: float) -> Iterator[None]:
    """Have all weights so many times as large inside, in storages of their own."""
    weights = [p for p in view.root.parameters() if p.is_floating_point()]
    with attributes_kept((weight, "data") for weight in weights):
        for weight in weights:
            weight.data = weight.data * share
        yield


def is_near(gaps: Gaps | None, most: float = _NEAR, most_gradient: float = _NEAR_GRADIENT) -> bool:
    """Return whether two runs are near to each other: as a clamp is to a guard, or nearer."""
    if gaps is None:
        return False
    loss, cosine, gradient = gaps
    return loss <= most and 1.0 - cosine <= most and gradient <= most_gradient
