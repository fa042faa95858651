"""Proof by trial: the smallest set of atoms that cures a failing micro-batch and leaves its
mathematics alone.

Nothing here knows what an atom does. A cure is proven when the micro-batch fails without it, passes
with it, fails again when any of its atoms is taken away, agrees with a float32 run of the same
micro-batch, holds on further micro-batches and in the updates that follow, and when it goes on to
fail and to pass in turn: what happens by chance does not. Finite alone is not fixed, and what
leaves out what fails has isolated it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from nanstop.prove.bench import AGREES, FAILED, Atoms, Bench, Budget, RunOn, RunTrial, SpentError
from nanstop.prove.minimize import minimize
from nanstop.records import Alternative, Atom, Proof, Reference, Safety, Trial, Verdict
from nanstop.records.line_forms import are_forms
from nanstop.records.remedies import kernel_place

Extend = Callable[[Trial], Atoms | None]

ALTERNATIONS = 3
"""How often a proven cure is taken away and put on again, each a run of its own."""

PURSUIT_LIMIT = 16
"""How often one candidate may grow by what ``extend`` proposes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cure:
    """A set that passes: its trial, its ablations, and how many micro-batches of those to
    confirm on it passed.
    """

    trial: Trial
    ablations: tuple[Trial, ...]
    grade: int
    distance: float
    passed: int
    runs: int
    complete: bool
    short: bool = False
    """Whether one of the runs that confirm it ended for want of memory, which says nothing."""
    following: Trial | None = None
    """The updates that follow under it, of a cure that is the best but for them;
    None, or not run to their end, where the host's cannot be.
    """
    safety: Safety = "safe"
    isolates: bool = False
    permitted: bool = True
    """Whether whoever asked lets it be applied."""
    again: tuple[Trial, ...] = ()
    """The failing micro-batch once more without the cure, with it, without it, ...:
    while each ends as it must.
    """

    @property
    def atoms(self) -> Atoms:
        return self.trial.atoms

    @property
    def holds(self) -> bool:
        """Whether every condition of a proof was met."""
        lasts = self.following is None or self.following.outcome != "other_failure"
        whole = self.complete and not self.short
        return whole and self.grade == AGREES and self.passed == self.runs and lasts

    @property
    def verdict(self) -> Verdict:
        if not self.holds:
            return "plausible"
        return "isolated" if self.isolates else "proven"

    def order(self) -> tuple[bool, int, bool, bool, int, int, bool, bool, int, float]:
        """What holds and may be applied first, then proven before what isolates, safe before what
        changes training, agreeing before bent, small, another kernel in the same format before a
        wider one, a line before a module, of one kind before of two, a part of a module before the
        whole, near float32.
        """
        return (
            not (self.holds and self.permitted),
            ("proven", "isolated", "plausible").index(self.verdict),
            self.safety != "safe",
            self.grade != AGREES,
            _num_changes(self.atoms),
            kernel_place(self.atoms),
            not are_forms(self.atoms),
            _is_mixed(self.atoms),
            -_depth(self.atoms),
            self.distance,
        )


def prove(  # noqa: PLR0913 - called once, by name
    baseline: Trial,
    candidates: Sequence[Atoms],
    trial: RunTrial,
    *,
    reference: Reference,
    safety_of: Callable[[Atoms], Safety],
    extend: Extend = lambda _: None,
    confirm: Sequence[int] = (),
    lasts: RunOn | None = None,
    isolates: Callable[[Atoms], bool] = lambda _: False,
    permitted: Callable[[Atoms], bool] = lambda _: True,
    anew: RunOn | None = None,
    budget: Budget | None = None,
) -> Proof:
    """Return the best cure among ``candidates``, with everything that was tried.

    ``baseline`` is the failing micro-batch without atoms. ``trial(atoms, micro)`` runs micro-batch
    ``micro`` (None: the failing one) under ``atoms``; what it raises, except KeyboardInterrupt,
    becomes an outcome. When a candidate does not pass, or not with the numbers of ``reference``,
    ``extend(its trial)`` may name the next larger set. ``confirm``: further micro-batches on which
    a cure must hold. ``lasts`` runs on under a cure, past the step that fails: the updates that
    follow must hold as well. ``isolates``: whether atoms leave out what fails. ``permitted``:
    whether they may be applied. ``anew(atoms)``: how the runs in turn are made, where not by
    ``trial``. Where ``reference`` fails too, ``Trial.rows_unchanged`` takes the place of agreement.
    """
    bench = Bench(trial, reference, budget or Budget(), baseline, anew)
    cures: dict[frozenset[Atom], _Cure] = {}
    untried: tuple[Atoms, ...] = ()
    for place, candidate in enumerate(candidates if baseline.outcome != "pass" else ()):
        holding = [frozenset(cure.atoms) for cure in cures.values() if cure.holds]
        if any(atoms < frozenset(candidate) for atoms in holding):
            continue  # its smallest part that passes is known
        is_settled = any(cure.holds and not _is_mixed(cure.atoms) for cure in cures.values())
        grow = (lambda _: None) if is_settled else extend
        try:
            found = _cure(bench, candidate, grow, confirm)
        except SpentError:
            untried = tuple(candidates[place:])
            break
        if found is not None:
            cured = replace(
                found,
                safety=safety_of(found.atoms),
                isolates=isolates(found.atoms),
                permitted=permitted(found.atoms),
            )
            cures.setdefault(frozenset(found.atoms), cured)
    ranked = _lasting(bench, cures.values(), lasts)
    if ranked:
        ranked[0] = _alternated(bench, ranked[0])
    return _proof(bench, ranked, untried)


def _is_mixed(atoms: Atoms) -> bool:
    """Return whether lines are written in forms of several kinds: one kind may do for all."""
    return are_forms(atoms) and len({atom.remedy for atom in atoms}) > 1


def _num_changes(atoms: Atoms) -> int:
    """Return how many changes atoms are: lines that are computed in float32 are one."""
    others = [atom for atom in atoms if atom.remedy != "fp32_line"]
    return len(others) + (len(others) < len(atoms))


def _depth(atoms: Atoms) -> int:
    """Return in how many modules the largest module in float32 lies; 0 where none is."""
    depths = [atom.target.count(".") for atom in atoms if atom.remedy == "island"]
    return min(depths, default=0)


def _cure(
    bench: Bench,
    candidate: Atoms,
    extend: Extend,
    confirm: Sequence[int],
) -> _Cure | None:
    """Return the minimal part of ``candidate``, grown as far as needed, or None. Raises
    SpentError before anything passed.
    """
    passing = _pursue(bench, candidate, extend)
    if passing is None:
        return None
    grade = bench.grade(passing)
    complete = True
    try:
        atoms = minimize(passing.atoms, lambda part: bench.grade(bench.run(part)) >= grade)
        passing = bench.run(atoms)
    except SpentError:
        complete = False
    without = [tuple(a for a in passing.atoms if a != atom) for atom in passing.atoms]
    ablations = bench.run_all([(atoms, None) for atoms in without])
    confirmed = bench.run_all([(passing.atoms, micro) for micro in confirm])
    complete = complete and len(ablations) + len(confirmed) == len(without) + len(confirm)
    return _Cure(
        trial=passing,
        ablations=ablations,
        grade=bench.grade(passing),
        distance=bench.distance(passing),
        passed=1 + sum(bench.holds(run) for run in confirmed),
        runs=1 + len(confirmed),
        complete=complete,
        short=any(run.outcome == "oom" for run in (*ablations, *confirmed)),
    )


def _lasting(bench: Bench, cures: Iterable[_Cure], lasts: RunOn | None) -> list[_Cure]:
    """Return the cures in their order; the updates that follow are run under the best, and under
    the next as long as they do not hold.
    """
    ranked = sorted(cures, key=_Cure.order)
    while lasts and ranked and ranked[0].verdict == "proven" and ranked[0].following is None:
        ranked[0] = replace(ranked[0], following=bench.run_on(ranked[0].atoms, lasts))
        ranked.sort(key=_Cure.order)
    return ranked


def _alternated(bench: Bench, cure: _Cure) -> _Cure:
    """Return the cure with further runs:
    without it, with it, in turn, up to the first that ends as it must not.
    """
    again: list[Trial] = []
    try:
        for turn in range(2 * ALTERNATIONS):
            turned = bench.run_anew(cure.atoms if turn % 2 else ())
            if turned.outcome == "oom":
                return replace(cure, again=tuple(again), short=True)
            again.append(turned)
            if (bench.grade(again[-1]) > FAILED) != (turn % 2 == 1):
                break
    except SpentError:
        return replace(cure, again=tuple(again), complete=False)
    return replace(cure, again=tuple(again))


def _pursue(bench: Bench, candidate: Atoms, extend: Extend) -> Trial | None:
    """Return the first trial of ``candidate`` or of what ``extend`` makes of it that agrees with
    the reference; else the first that passes; None if there is none.
    """
    seen: set[frozenset[Atom]] = set()
    bent: Trial | None = None
    larger: Atoms | None = candidate
    while larger is not None and frozenset(larger) not in seen and len(seen) <= PURSUIT_LIMIT:
        seen.add(frozenset(larger))
        try:
            current = bench.run(larger)
        except SpentError:
            if bent is None:
                raise
            break
        if bench.grade(current) == AGREES:
            return current
        bent = bent or (current if bench.grade(current) > FAILED else None)
        larger = extend(current)
    return bent


def _proof(bench: Bench, ranked: Sequence[_Cure], untried: Sequence[Atoms]) -> Proof:
    chance = bench.baseline.outcome == "pass" or any(_is_chance(bench, cure) for cure in ranked)
    best = ranked[0] if ranked and not chance else None
    proof = Proof(
        incident="",  # whoever keeps the report gives the id
        verdict=best.verdict if best is not None else "none_found",
        minimal=(),
        chance=chance,
        baseline=bench.baseline,
        tried=bench.tried,
        reference=bench.reference,
        next_experiment=_next_experiment(bench, best, untried, chance=chance),
        seconds=bench.seconds,
    )
    if best is None:
        return proof
    return replace(
        proof,
        minimal=best.atoms,
        passing=tuple(
            run
            for (atoms, _), run in bench.done.items()
            if atoms == frozenset(best.atoms) and bench.grade(run) > FAILED
        )
        + best.again[1::2],
        ablations=best.ablations + (best.again[::2] if len(best.atoms) == 1 else ()),
        alternatives=tuple(_alternative(cure) for cure in ranked[1:]),
        cost=_cost(bench.baseline, best.trial),
        safety=best.safety,
    )


def _is_chance(bench: Bench, cure: _Cure) -> bool:
    """Return whether the last of the runs in turn, without the cure or with it, did not end as
    those before.
    """
    if not cure.again:
        return False
    with_cure = len(cure.again) % 2 == 0
    return (bench.grade(cure.again[-1]) > FAILED) != with_cure


def _alternative(cure: _Cure) -> Alternative:
    """Return a cure that is not the best. The updates that follow count as a run."""
    after = cure.following.outcome if cure.following is not None else ""
    return Alternative(
        atoms=cure.atoms,
        safety=cure.safety,
        passed=cure.passed + (after == "pass"),
        runs=cure.runs + (after in ("pass", "other_failure")),
        loss_gap=cure.trial.loss_gap,
        grad_cosine=cure.trial.grad_cosine,
    )


def _cost(baseline: Trial, cured: Trial) -> str:
    """Time and memory of the cured micro-batch against the failing one, on a device that reports
    its memory.

    On a CPU half formats are slower than float32, which says nothing of the device that a run is
    meant for.
    """
    if not (baseline.peak_bytes and cured.peak_bytes and baseline.seconds > 0.0):
        return ""
    time = f"{100.0 * (cured.seconds / baseline.seconds - 1.0):+.1f} % time"
    return f"{time}, {(cured.peak_bytes - baseline.peak_bytes) / 2**20:+.1f} MiB"


def _next_experiment(
    bench: Bench, best: _Cure | None, untried: Sequence[Atoms], *, chance: bool
) -> str:
    """What would settle what this proof could not; empty where nothing is open."""
    if chance:
        return (
            "the micro-batch does not always end alike when run again: look for what it draws "
            "or reads besides its batch, then for a race"
        )
    if best is not None:
        return "" if best.holds else _open_question(bench, best)
    if untried:
        return (
            f"the budget ended with {len(untried)} candidates untried: allow more trials or seconds"
        )
    return _without_a_cure(bench)


def _without_a_cure(bench: Bench) -> str:
    """What to look at where every candidate was tried and none passes."""
    if bench.reference.still_in:
        return (
            f"a part of the step is cast to {bench.reference.still_in} by the script itself, even "
            "in the float32 run: cast to float32 there"
        )
    if bench.reference.outcome == "oom":
        return "memory is short for any float32 run: run this step again where there is more"
    if bench.reference.outcome != "pass":
        widest = bench.reference.widest
        behind = [run.message for run in bench.tried if run.outcome == "other_failure"]
        if any(behind):
            return f"once what fails first is gone, {behind[-1]} fails; {widest} fails too"
        known = widest == "float64"
        rest = "no number format cures this" if known else "whether float64 would is not known"
        return f"{widest} fails too: {rest}"
    if bench.baseline.key is not None and bench.baseline.key.phase == "optimizer":
        return "forward and backward are finite: look at the optimizer's own arithmetic"
    moved = [run for run in bench.tried if run.outcome == "other_failure" and run.key is not None]
    if moved and moved[-1].key is not None:
        key = moved[-1].key
        return (
            f"the failure moved to `{key.op}` in `{key.module}`: take that into the float32 region"
        )
    if bench.reference.dtype != "float32":
        return (
            f"only {bench.reference.dtype} passes: compute what leads to it in "
            f"{bench.reference.dtype}, or look for a form that needs less range and precision"
        )
    return "float32 passes: keep a wider region in float32, or train in bfloat16"


def _open_question(bench: Bench, cure: _Cure) -> str:
    if cure.short:
        return "memory was short for runs that confirm it: run this step again where there is more"
    if not cure.complete:
        return "the budget ended before the cure was confirmed: allow more trials or seconds"
    if cure.trial.loss is None and not cure.isolates:
        return "it cures this step, and what follows is not known: the step ends before its loss"
    if cure.following is not None and cure.following.outcome == "other_failure":
        return f"it cures this step and not what follows: {cure.following.message}"
    if cure.passed < cure.runs:
        missed = cure.runs - cure.passed
        return f"it fails on {missed} of {cure.runs} micro-batches: investigate one of those"
    if bench.reference.outcome != "pass":
        return (
            "float32 fails too: compare loss and gradient of the healthy rows with and without it"
        )
    if math.isinf(cure.distance):
        return f"finite, but its distance to {bench.reference.dtype} was not measured"
    return (
        f"finite, but {cure.distance:.3g} times as far from {bench.reference.dtype} as is allowed"
    )
