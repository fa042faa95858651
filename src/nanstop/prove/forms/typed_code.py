"""Whether what can be typed for forms of lines does the same on the failing step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from nanstop.prove.failing_step import FailingStep
from nanstop.prove.forms.evidence import is_near
from nanstop.prove.reference.agreement import Gaps, gaps_between
from nanstop.prove.reference.exact import ExactRuns
from nanstop.prove.reference.exact_update import is_same_update
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from nanstop.remedies.forms.typed import Typed, typed
from nanstop.replay.rerun import Attempt
from nanstop.replay.step import ModelView
from nanstop.rewrite.forms.form_code import FormCode

_NOTHING = 1e-15
"""The root of the smallest normal number of float32 is 1e-19."""


def typed_forms(
    failing: FailingStep, exact: ExactRuns, codes: Iterable[FormCode]
) -> tuple[Atom, ...] | None:
    """Return the forms, those of the cure first, whose code passes the failing micro-batch with the
    loss and gradients that they have there, if it comes to a loss, of an update that moves weights
    as they do; empty where none does, or where one would be of numbers that are no tensors; None
    where none could be run.
    """
    view, found = failing.step.view, None
    for code in codes:
        forms = partial(applied, view, (*code.atoms, *code.rest))
        seen: list[Typed] = []
        as_typed = partial(_as_typed, view, code, seen)
        if failing.update:
            is_alike = is_same_update(failing, forms, as_typed)
        else:
            run = exact.attempt(failing.micro, under=as_typed)
            formed = exact.attempt(failing.micro, under=forms)
            is_ended = not run.failed and run.loss is None and formed.loss is None
            gaps = gaps_between(run, formed)
            is_alike = is_ended or is_near(gaps) or _have_nothing(gaps, run, formed)
        if not seen or not all(one.is_run for one in seen):
            found = () if any(one.is_refuted for one in seen) else found
            continue
        if is_alike:
            return code.atoms
        found = ()
    return found


def _have_nothing(gaps: Gaps | None, *runs: Attempt) -> bool:
    """Return whether two runs of one loss have no gradient to speak of: one of 0 has no direction,
    and a root of the number that code clamps at is none.
    """
    grads = [one for run in runs for one in (run.grads or {}).values()]
    return is_near(gaps and (gaps[0], 1.0, 0.0)) and all(map(_is_nothing, grads))


def _is_nothing(grad: Tensor) -> bool:
    return not grad.numel() or float(grad.abs().max()) <= _NOTHING


@contextmanager
def _as_typed(view: ModelView, code: FormCode, seen: list[Typed]) -> Iterator[None]:
    with applied(view, code.rest), typed(code.files) as found:
        seen += found
        yield
