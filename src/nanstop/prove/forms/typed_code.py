"""Whether what can be typed for forms of lines does the same on the failing step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from nanstop.prove.failing_step import FailingStep
from nanstop.prove.forms.evidence import is_near
from nanstop.prove.reference.agreement import gaps_between
from nanstop.prove.reference.exact import ExactRuns
from nanstop.prove.reference.exact_update import is_same_update
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from nanstop.remedies.forms.typed import Typed, typed
from nanstop.replay.step import ModelView
from nanstop.rewrite.forms.form_code import FormCode


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
            is_alike = is_ended or is_near(gaps_between(run, formed))
        if not seen or not all(one.is_run for one in seen):
            found = () if any(one.is_refuted for one in seen) else found
            continue
        if is_alike:
            return code.atoms
        found = ()
    return found


@contextmanager
def _as_typed(view: ModelView, code: FormCode, seen: list[Typed]) -> Iterator[None]:
    with applied(view, code.rest), typed(code.files) as found:
        seen += found
        yield
