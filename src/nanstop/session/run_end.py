"""Whether a run that remedies were in force in is finite at its end, and where to look."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanstop.errors import NanstopError
from nanstop.numerics.tensors import is_inexact, nonfinite
from nanstop.ranks import is_first
from nanstop.records import Atom, Report, codec
from nanstop.replay.step import ModelView, trainable_of
from nanstop.report.announce import short
from nanstop.report.text.run_end import RunEnd
from nanstop.session.history import History
from nanstop.session.run_state import RunState
from nanstop.store.incidents import Store, load_report

_LAST = 3
"""Losses at the end of a run that are looked at."""


def filled(end: RunEnd, run: RunState, store: Store, kept: tuple[Atom, ...]) -> RunEnd:
    """Return the end of a run with what it has met, where that is kept, and whether it is finite
    under the remedies that were ``kept`` to its end.
    """
    met = [one for one in run.reports if one.incident.id in end.failures]
    end.met(met, store.merged.incidents if is_first() else ())
    end.folders = folders_of(end, met, store)
    if kept:
        end.kept, end.not_finite = kept, not_finite(run.view, run.series)
    return end


def not_finite(view: ModelView, series: History) -> tuple[str, ...] | None:
    """Return what is not finite at the end of a run: weights and optimizer state by name, "loss"
    for the last losses; None where that cannot be looked at. Reads each value once; synchronises
    the device.
    """
    try:
        return _not_finite(view, series)
    except Exception:  # what was trained may be gone by now
        return None


def _not_finite(view: ModelView, series: History) -> tuple[str, ...]:
    trained = trainable_of(view)
    weights = {name: p.detach() for name, p in trained.parameters.items()}
    state = {n: v for n, v in trained.state_tensors().items() if is_inexact(v)}
    losses = next((one.values for one in series.recent() if one.name == "loss_raw"), ())
    bad = not all(map(math.isfinite, losses[-_LAST:]))
    return (*nonfinite(weights), *nonfinite(state), *(("loss",) if bad else ()))


def folders_of(end: RunEnd, met: Sequence[Report], store: Store) -> list[tuple[str, str]]:
    """Return where to look for what a run has ``met`` and found, as ``RunEnd`` says it: a rank that
    has looked into a failure of all may have a folder that is not this one's.
    """
    own = store.folder.absolute()
    places = {one.incident.id: _place(one, end.kept_in, store) for one in met}
    others = [one for one in dict.fromkeys(places.values()) if one is not None]
    has_own = end.findings or None in places.values() or len(end.failures) > len(met)
    here = [("", short(own))] if has_own or not others else []
    return here + [(machine, path if machine else short(Path(path))) for machine, path in others]


def _place(report: Report, kept_in: Mapping[str, str], store: Store) -> tuple[str, str] | None:
    """Return the machine, "" for this one, and the folder where another rank keeps an incident;
    None: it is in the store.
    """
    machine, _, folder = kept_in.get(report.incident.id, "").partition(":")
    if not folder or folder == str(store.folder.absolute()) or _has(store, report):
        return None
    return ("" if machine == platform.node() else machine), folder


def _has(store: Store, report: Report) -> bool:
    try:
        there = load_report(store.folder / report.incident.id).incident
    except NanstopError:
        return False
    return codec.to_json(there) == codec.to_json(report.incident)  # a NaN is not itself
