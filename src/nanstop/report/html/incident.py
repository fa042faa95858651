"""One incident as the parts of a page: the terminal's sentences, and what they rest on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from nanstop.diagnose.evidence.reading import bad_counts, op_name
from nanstop.records import FORMAT_MAX, BatchFact, OpEvent, Proof, Report, TensorStats, Trial
from nanstop.records.remedies import describe
from nanstop.report.html.exponents import Histogram, histograms
from nanstop.report.html.module_tree import Fact, Node, module_tree
from nanstop.report.text.blocks import Block, incident_blocks
from nanstop.report.text.in_code import code_blocks
from nanstop.rewrite.change import Rewrite, change_for
from nanstop.rewrite.files import is_of_project, read, unified
from nanstop.wording import number

MOST_ROWS = 60
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentParts:
    """``blocks``: the terminal's. ``diffs``: the cure in the user's own files, to copy;
    ``words``: what of it is to be typed. ``grows``: whether values were recorded on the way.
    Tables are empty where nothing was recorded.
    """

    report: Report
    blocks: tuple[Block, ...]
    cure: str
    diffs: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    growth: Node | None
    grows: bool
    histograms: tuple[Histogram, ...]
    proof: Rows
    rows: Rows
    batch: Rows
    signals: Rows


def incident_parts(
    report: Report, record: str | None, *, name: str, draw: bool, show_text: bool
) -> IncidentParts:
    """Return an incident's parts. ``record``: path of its ``report.json``, to point to.
    ``name``: of its charts, which are there with ``draw``.

    ``show_text``: with the messages of exceptions, which may quote data. Reads the files that the
    cure changes, as they are now.
    """
    change = Rewrite()
    with suppress(Exception):  # a report must be shown whatever a file holds
        change = change_for(report, read)
    proof, found = report.proof, report.localization
    return IncidentParts(
        report=report,
        blocks=incident_blocks(report, record, code_blocks(report, record)),
        cure=_cure(change, proof),
        diffs=tuple(_own_diffs(change)),
        words=change.words,
        growth=_growth(report),
        grows=any(event.outputs for event in (*found.growth, found.first_bad) if event)
        if found is not None
        else False,
        histograms=tuple(histograms(found.first_bad if found else None, name, draw=draw)),
        proof=tuple(_proof_rows(proof))[:MOST_ROWS] if proof is not None else (),
        rows=_positions(report),
        batch=tuple(_batch_row(fact) for fact in report.incident.batch[:MOST_ROWS]),
        signals=_signals(report, show_text=show_text),
    )


def _cure(change: Rewrite, proof: Proof | None) -> str:
    if not change.atoms:
        return ""
    return f"{describe(change.atoms)} [{proof.verdict if proof is not None else 'not tried'}]"


def _own_diffs(change: Rewrite) -> Iterator[tuple[str, str]]:
    """Yield name and diff of each changed file below the working folder that is no library's."""
    here = Path.cwd().resolve()
    for one in change.files:
        if is_of_project(one.file):
            name = Path(one.file).resolve().relative_to(here).as_posix()
            yield name, unified(one, name)


def _growth(report: Report) -> Node | None:
    """Return how values grew up to the first bad operation, over the modules' tree."""
    found = report.localization
    if found is None or (found.first_bad is None and not found.growth):
        return None
    bad = found.first_bad
    dtype = next((s.dtype for s in bad.outputs if not s.finite), "float32") if bad else "float32"
    path = found.growth if bad is None else (*found.growth, bad)
    return module_tree(
        (event.module, _fact(f"{place}.", event, dtype, "bad" if event is bad else ""))
        for place, event in enumerate(path, 1)
    )


def _fact(place: str, event: OpEvent, dtype: str, kind: str) -> Fact:
    largest = max(event.outputs, key=lambda stats: stats.absmax, default=None)
    bad = next((stats for stats in event.outputs if not stats.finite), None)
    shown = bad or largest
    text = f"{place} {op_name(event.op)}, {event.phase}"
    if shown is not None:
        text += f": {shown.dtype}, {_range(shown)}"
    share = 1.0 if bad else _share(largest, dtype)
    source = event.source
    file = source.file.replace("\\", "/").rsplit("/", 1)[-1] if source is not None else ""
    return Fact(text, kind, share, f"{file}:{source.line}" if source is not None else "")


def _range(stats: TensorStats) -> str:
    return f"max {number(stats.absmax)}" if stats.finite else bad_counts(stats)


def _share(stats: TensorStats | None, dtype: str) -> float | None:
    """Return how far the largest value is from 1 to the end of a format, in doublings; None for
    the largest number of the value's own format, which a mask is filled with.
    """
    if stats is None or not stats.absmax < FORMAT_MAX.get(stats.dtype, math.inf):
        return None
    end = math.log2(FORMAT_MAX.get(dtype, FORMAT_MAX["float32"]))
    return min(max(math.log2(max(stats.absmax, 1.0)) / end, 0.0), 1.0)


PROOF_COLUMNS = ("run", "outcome", "loss", "loss to float32", "gradient cosine", "seconds")


def _proof_rows(proof: Proof) -> Iterator[tuple[str, ...]]:
    """Yield the runs of a proof in turn: as it is, with the cure, as it is, with the cure."""
    removed = proof.ablations or ((proof.baseline,) if proof.baseline is not None else ())
    for without, cured in zip_longest(removed, proof.passing):
        if without is not None:
            yield _trial_row(without, describe(without.atoms) if without.atoms else "as it is")
        if cured is not None:
            yield _trial_row(cured, describe(cured.atoms))
    reference = proof.reference
    if reference is not None:
        loss = _said(reference.loss)
        yield (f"in {reference.dtype}", _outcome(reference.outcome), loss, "", "", "")
    told = {describe(proof.minimal)}
    for other in proof.alternatives:
        if describe(other.atoms) in told:
            continue
        told.add(describe(other.atoms))
        passed = f"passes {other.passed}/{other.runs}"
        gaps = _said(other.loss_gap), _said(other.grad_cosine)
        yield (f"or {describe(other.atoms)}", passed, "", *gaps, "")
    for trial in proof.tried:
        if describe(trial.atoms) not in told:
            yield _trial_row(trial, f"tried: {describe(trial.atoms)}")
            told.add(describe(trial.atoms))


def _trial_row(trial: Trial, name: str) -> tuple[str, ...]:
    gaps = _said(trial.loss_gap), _said(trial.grad_cosine)
    return (name, _outcome(trial.outcome), _said(trial.loss), *gaps, f"{trial.seconds:.2f}")


def _outcome(outcome: str) -> str:
    return {"pass": "passes", "same_failure": "fails"}.get(outcome, outcome.replace("_", " "))


def _said(value: float | None) -> str:
    return "" if value is None else number(value)


def _positions(report: Report) -> Rows:
    found = report.localization
    places = found.positions if found is not None and found.positions is not None else ()
    return tuple(
        (str(one.sample), _said(one.first_token), _said(one.last_token))
        for one in places[:MOST_ROWS]
    )


BATCH_COLUMNS = ("micro-batch", "entry", "shape", "format", "smallest", "largest", "not finite")


def _batch_row(fact: BatchFact) -> tuple[str, ...]:
    shape = "x".join(str(size) for size in fact.shape)
    ends = _said(fact.minimum), _said(fact.maximum)
    return (str(fact.micro), fact.name, shape, fact.dtype, *ends, str(fact.num_bad))


def _signals(report: Report, *, show_text: bool) -> Rows:
    return tuple(
        (one.source, one.name, _said(one.value), one.message if show_text else "")
        for one in report.incident.signals[:MOST_ROWS]
    )
