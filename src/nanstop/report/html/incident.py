"""One incident as the parts of a page: the terminal's sentences, and what they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from nanstop.diagnose.evidence.reading import bad_counts, op_name
from nanstop.errors import NanstopError
from nanstop.records import FORMAT_MAX, BatchFact, OpEvent, Proof, Report, TensorStats, Trial
from nanstop.records.line_forms import is_bounded
from nanstop.records.remedies import describe
from nanstop.report.html.exponents import Histogram, histograms
from nanstop.report.html.module_tree import Fact, Node, module_tree
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.blocks.incident import incident_blocks
from nanstop.report.text.in_code import code_blocks, is_code
from nanstop.rewrite.change import Rewrite, change_for, cure_of, is_untried, mends_source
from nanstop.rewrite.files import is_of_project, read, unified
from nanstop.store.files import read_text
from nanstop.store.incidents import PATCH
from nanstop.wording import number, typed

MOST_ROWS = 60
MOST_APPLIED = 100_000
Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A run of the failing step. ``cells``: what ``PROOF_COLUMNS`` say of it, behind its name.
    ``more``: what else is known of it, each with its label.
    """

    name: str
    cells: tuple[str, ...]
    more: Rows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentParts:
    """``blocks``: the terminal's, without the code where ``diffs`` have all of it: the cure in the
    user's own files, to copy. ``cure``: what that is, and how it is known. ``words``: what of it is
    to be typed. ``command``: writes it. ``applied``: what ``nanstop fix`` has written; ``stale``:
    lines that have another text now. ``code``: of the finding that it is. ``grows``: whether values
    were recorded on the way. Tables are empty where nothing was recorded.
    """

    report: Report
    code: str
    blocks: tuple[Block, ...]
    cure: tuple[str, str]
    command: str
    diffs: tuple[tuple[str, str], ...]
    applied: str
    stale: tuple[str, ...]
    words: tuple[str, ...]
    growth: Node | None
    grows: bool
    histograms: tuple[Histogram, ...]
    proof: tuple[TrialRow, ...]
    rows: Rows
    batch: Rows
    signals: Rows

    @property
    def has_code(self) -> bool:
        """Whether there is code to copy."""
        return bool(self.diffs) or any("\n" in text for text in self.words)


def incident_parts(
    report: Report,
    record: str | None,
    *,
    name: str,
    draw: bool,
    show_text: bool,
    say: Callable[[str], str] = str,
) -> IncidentParts:
    """Return an incident's parts. ``record``: path of its ``report.json``, to point to.
    ``name``: of its charts, which are there with ``draw``. ``say``: as of ``panels``.

    ``show_text``: with the messages of exceptions, which may quote data. Reads the files that the
    cure changes, as they are now.
    """
    change = Rewrite()
    with suppress(Exception):  # a report must be shown whatever a file holds
        change = change_for(report, read)
    proof, found = report.proof, report.localization
    diffs = tuple(_own_diffs(change))
    code = tuple(b for b in code_blocks(report, record) if not (diffs and is_code(b)))
    return IncidentParts(
        report=report,
        code=report.diagnoses[0].code if report.diagnoses else "",
        blocks=incident_blocks(report, record, code),
        cure=_cure(change, report),
        command=f"nanstop fix {typed(Path(record).parent)} --apply" if record and diffs else "",
        diffs=diffs,
        applied=_applied(record) if change.stale else "",
        stale=tuple(Path(one).name for one in change.stale),
        words=change.words,
        growth=_growth(report),
        grows=any(event.outputs for event in (*found.growth, found.first_bad) if event)
        if found is not None
        else False,
        histograms=tuple(histograms(found.first_bad if found else None, name, draw=draw, say=say)),
        proof=tuple(_trials(proof))[:MOST_ROWS] if proof is not None else (),
        rows=_positions(report),
        batch=tuple(_batch_row(fact) for fact in report.incident.batch[:MOST_ROWS]),
        signals=_signals(report, show_text=show_text),
    )


def _cure(change: Rewrite, report: Report) -> tuple[str, str]:
    """Return what the change is, and how it is known to cure."""
    if not change.atoms:
        return "", ""
    proof = report.proof
    if mends_source(report) is not None:
        known = "tried on its rows"
    elif proof is None:
        known = "not tried"
    elif change.atoms != cure_of(report):
        known = "another form, which may end in another loss"
    else:
        verdict = proof.verdict if change.atoms == proof.minimal else "plausible"
        known = "not run on this step" if is_untried(proof) else verdict.replace("_", " ")
        if known == "plausible" and is_bounded(change.atoms):
            known = "plausible: the bound is yours to choose"
    return describe(change.atoms), known


def _own_diffs(change: Rewrite) -> Iterator[tuple[str, str]]:
    """Yield name and diff of each changed file below the working folder that is no library's."""
    here = Path.cwd().resolve()
    for one in change.files:
        if is_of_project(one.file):
            name = Path(one.file).resolve().relative_to(here).as_posix()
            yield name, unified(one, name)


def _applied(record: str | None) -> str:
    """Return the diff that ``nanstop fix`` has applied, "" where it has not."""
    if record is None:
        return ""
    with suppress(OSError, NanstopError):
        return read_text(Path(record).parent / PATCH, MOST_APPLIED)
    return ""


def _growth(report: Report) -> Node | None:
    """Return how values grew up to the first bad operation, over the modules' tree."""
    found = report.localization
    if found is None or (found.first_bad is None and not found.growth):
        return None
    bad = found.first_bad
    dtype = next((s.dtype for s in bad.outputs if not s.finite), "float32") if bad else "float32"
    path = tuple(event for event in found.growth if not _is_mask(event))
    path = path if bad is None else (*path, bad)
    return module_tree(
        (event.module, _fact(place, event, dtype, "bad" if event is bad else ""))
        for place, event in enumerate(path, 1)
    )


def _is_mask(event: OpEvent) -> bool:
    """Return whether what was made holds the largest number of its format, which a mask is filled
    with: it says nothing of how values grew.
    """
    return any(
        one.finite and one.absmax >= FORMAT_MAX.get(one.dtype, math.inf) for one in event.outputs
    )


def _fact(place: int, event: OpEvent, dtype: str, kind: str) -> Fact:
    largest = max(event.outputs, key=lambda stats: stats.absmax, default=None)
    bad = next((stats for stats in event.outputs if not stats.finite), None)
    shown = bad or largest
    text = f"{op_name(event.op)}, {event.phase}"
    if shown is not None:
        text += f": {shown.dtype}, {_range(shown)}"
    share = 1.0 if bad else _share(largest, dtype)
    source = event.source
    file = source.file.replace("\\", "/").rsplit("/", 1)[-1] if source is not None else ""
    origin = f"{file}:{source.line}" if source is not None else ""
    return Fact(text, kind, share, origin, f"{place}. ")


def _range(stats: TensorStats) -> str:
    return f"max {number(stats.absmax)}" if stats.finite else bad_counts(stats)


def _share(stats: TensorStats | None, dtype: str) -> float | None:
    """Return how far the largest value is from 1 to the end of a format, in doublings; None where
    nothing was recorded.
    """
    if stats is None:
        return None
    end = math.log2(FORMAT_MAX.get(dtype, FORMAT_MAX["float32"]))
    return min(max(math.log2(max(stats.absmax, 1.0)) / end, 0.0), 1.0)


PROOF_COLUMNS = ("run", "outcome", "loss", "loss to float32", "gradient cosine", "seconds")


def _trials(proof: Proof) -> Iterator[TrialRow]:
    """Yield the runs of a proof in turn: as it is, with the cure, as it is, with the cure."""
    removed = proof.ablations or ((proof.baseline,) if proof.baseline is not None else ())
    for without, cured in zip_longest(removed, proof.passing):
        if without is not None:
            yield _trial(without, describe(without.atoms) if without.atoms else "as it is")
        if cured is not None:
            yield _trial(cured, describe(cured.atoms))
    reference = proof.reference
    if reference is not None:
        cells = (_outcome(reference.outcome), _said(reference.loss), "", "", "")
        yield TrialRow(name=f"in {reference.dtype}", cells=cells)
    told = {describe(proof.minimal)}
    for other in proof.alternatives:
        if describe(other.atoms) in told:
            continue
        told.add(describe(other.atoms))
        cells = (f"passes {other.passed}/{other.runs}", "", _said(other.loss_gap))
        cells = (*cells, _said(other.grad_cosine), "")
        yield TrialRow(name=f"or {describe(other.atoms)}", cells=cells)
    for trial in proof.tried:
        if describe(trial.atoms) not in told:
            yield _trial(trial, f"tried: {describe(trial.atoms)}")
            told.add(describe(trial.atoms))


def _trial(trial: Trial, name: str) -> TrialRow:
    gaps = _said(trial.loss_gap), _said(trial.grad_cosine)
    cells = (_outcome(trial.outcome), _said(trial.loss), *gaps, f"{trial.seconds:.2f}")
    return TrialRow(name=name, cells=cells, more=tuple(_more(trial)))


def _more(trial: Trial) -> Iterator[tuple[str, str]]:
    """Yield what else is known of a trial, each with its label."""
    key = trial.key
    if key is not None:
        where = f" at {key.module}" if key.module else ""
        op = f" in `{op_name(key.op)}`" if key.op else ""
        yield "what failed", f"{key.kind}{op}, {key.phase}{where}"
    yield "micro-batch", str(trial.micro)
    if trial.grad_gap is not None:
        yield "largest distance of a gradient to float32", _said(trial.grad_gap)
    if trial.rows_unchanged is not None:
        yield "healthy rows", "unchanged" if trial.rows_unchanged else "changed"
    if trial.causal is not None:
        yield "a token sees later ones", "no" if trial.causal else "yes"
    if trial.peak_bytes:
        yield "memory at its peak", f"{trial.peak_bytes / 2**20:.0f} MiB"


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
