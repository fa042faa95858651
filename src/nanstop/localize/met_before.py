"""Tensors that were not finite when a failure was looked into: one that the script keeps, and gives
to a later step, is told of with the failure that it was first met in.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from nanstop.numerics.tensors import has_bad, version
from nanstop.records import Localization, Report, StepId
from nanstop.records.values import entry_of
from nanstop.replay.step import Step

_MOST = 256
"""Tensors that are remembered."""


class BadTensors:
    """Those of a run, by reference that does not keep them."""

    def __init__(self) -> None:
        self._met: list[tuple[weakref.ref[Tensor], int, StepId]] = []

    def note(self, step: Step, micro: int, at: StepId) -> None:
        """Remember what a failing micro-batch was given, and what the script had made for it, as
        far as it is not finite. ``at``: of its report. Synchronises the device.
        """
        made = getattr(step, "made_before", lambda _: ())(micro)
        given = (*step.batches[micro].values(), *made)
        bad = {id(one): one for one in given if isinstance(one, Tensor) and has_bad(one)}
        met = [(weakref.ref(one), version(one), at) for one in bad.values()]
        self._met = [*self._met, *met][-_MOST:]

    def first_told(
        self, step: Step, micro: int, found: Localization | None, reports: Sequence[Report]
    ) -> Report | None:
        """Return the earliest of the reports whose failures read the very tensor that a failure is
        said to come of, with the values that it has, in the same line.
        """
        if found is None or found.origin != "from_batch" or not found.culprit:
            return None
        read = step.batches[micro].get(entry_of(found.culprit))
        if read is None:
            return None
        met = [at for ref, number, at in self._met if ref() is read and number == version(read)]
        told = [one for one in reports if one.incident.at in met and _line(one) == _line_of(found)]
        return min(told, key=lambda one: met.index(one.incident.at), default=None)


def is_at_same_line(report: Report, found: Localization | None) -> bool:
    """Return whether a failure that was reported was born at the line of another."""
    line = _line(report)
    return line is not None and found is not None and line == _line_of(found)


def _line(report: Report) -> tuple[str, int] | None:
    return _line_of(report.localization) if report.localization is not None else None


def _line_of(found: Localization) -> tuple[str, int] | None:
    source = found.first_bad.source if found.first_bad is not None else None
    return (source.file, source.line) if source is not None else None
