"""``nanstop doctor``: which guards of a stack really keep a failure from the weights, judged from
trials.

Pure but for ``doctor``. A guard is judged by what its absence changes: the training with every
guard in place against the same one without it, and, where another guard would have stopped the
failure as well, with it alone against none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from nanstop.commands.doctor.result import (
    INJECTED,
    Act,
    Doctor,
    Guard,
    GuardRow,
    GuardTrial,
    Injected,
    InjectedRow,
)
from nanstop.errors import NanstopError
from nanstop.process.inject.dry_run import dry_run
from nanstop.process.inject.progress import Follow, Progress, tell
from nanstop.records.codec import to_json
from nanstop.records.record import record
from nanstop.store.files import write_whole

FAR = 1e3
"""Weights that go this many times as far as without the failure have been thrown away, finite or
not.
"""

_SPEAKING = ("callback", "line", "watch")
_STOPS: tuple[Act, ...] = ("stops the write", "stops after the write")


CLIP = "gradient clipping"
FILTER = "log filter (logging_nan_inf_filter)"
SCALER = "loss scaler"
WATCH = "nanstop.watch"
"""What guards are called; clipping adds its bound."""


@record
class Audit:
    """What a child process has seen so far: the trials that are due may need another one."""

    host: str
    guards: tuple[Guard, ...]
    trials: tuple[GuardTrial, ...]
    notes: tuple[str, ...] = ()


class Setting(NamedTuple):
    """A trial to be run: a failure, and the names of the guards to take away."""

    injected: Injected
    removed: tuple[str, ...] = ()


def doctor(command: Sequence[str], follow: Follow | None = None) -> Doctor:
    """Run a script up to its first training and audit the guards of what it built.

    Nothing is saved or pushed.

    The child's output goes to standard error, or is followed as ``dry_run`` has it. Errors:
    ``NanstopError`` NS001 as ``dry_run``.
    """
    found = Audit(host="", guards=(), trials=())
    while not found.host or due(guards_seen(found.guards, found.trials), found.trials):
        before = len(found.trials)
        with TemporaryDirectory(prefix="nanstop-") as folder:
            known = Path(folder, "known.json")
            write_whole(known, to_json(found).encode())
            found = dry_run(
                command,
                f"{__package__}.job",
                Audit,
                options={"known": str(known)},
                keeps_watch=True,
                follow=follow,
            )
        if len(found.trials) == before:
            raise NanstopError(
                "the loop ended before a failure could be planted",
                hint="four updates of its optimizer are needed",
            )
    return judge(found)


def guards_seen(guards: Sequence[Guard], trials: Iterable[GuardTrial]) -> tuple[Guard, ...]:
    """Return the guards and, as guards of their own, the lines that were seen to read a failure."""
    read: dict[str, list[Injected]] = {}
    for trial in trials:
        if not trial.removed:
            for line in trial.lines:
                read.setdefault(line, []).append(trial.injected)
    lines = (Guard(name=line, kind="line", cases=tuple(cases)) for line, cases in read.items())
    return (*guards, *lines)


def due(guards: Sequence[Guard], trials: Sequence[GuardTrial]) -> tuple[Setting, ...]:
    """Return the trials that are still needed, none when the audit is complete.

    ``guards``: as ``guards_seen``.
    """
    known = _by_plan(trials)
    wanted = [setting for injected in INJECTED for setting in _wanted(injected, guards, known)]
    return tuple(setting for setting in dict.fromkeys(wanted) if setting not in known)


def say_how_far(trials: Sequence[GuardTrial], left: Sequence[Setting]) -> None:
    """Tell whoever waits how many trials are over, and how many are known to be left."""
    tell(Progress(done=len(trials), total=len(trials) + len(left)))


def judge(audit: Audit) -> Doctor:
    """Return what a complete audit says of each guard and each failure."""
    trials = audit.trials
    known, every = _by_plan(trials), guards_seen(audit.guards, trials)
    acts: dict[tuple[str, Injected], Act] = {
        (guard.name, injected): _act(injected, guard, every, known)
        for guard in every
        for injected in INJECTED
    }
    rest = Guard(name=audit.host, kind="host")
    rows = [GuardRow(guard=g, acts=tuple(acts[g.name, i] for i in INJECTED)) for g in every]
    own: tuple[Act, ...] = tuple(_host_act(injected, every, known) for injected in INJECTED)
    failures = tuple(
        _failure(
            known.get(Setting(injected)),
            injected,
            tuple(g.name for g in every if acts[g.name, injected] == "stops the write"),
        )
        for injected in INJECTED
    )
    return Doctor(
        host=audit.host,
        failures=failures,
        guards=(*rows, GuardRow(guard=rest, acts=own)),
        trials=trials,
        notes=audit.notes,
    )


def harmed(trial: GuardTrial) -> bool:
    """Return whether the failure got into the weights or into the optimizer's state."""
    return bool(trial.bad_weights or trial.bad_state) or not trial.growth <= FAR


Known = Mapping[Setting, GuardTrial]


def _by_plan(trials: Iterable[GuardTrial]) -> Known:
    return {Setting(trial.injected, trial.removed): trial for trial in trials}


def _names(injected: Injected, guards: Sequence[Guard]) -> tuple[str, ...]:
    return tuple(guard.name for guard in guards if injected in guard.cases)


def _alone(injected: Injected, name: str, guards: Sequence[Guard]) -> Setting:
    return Setting(injected, tuple(n for n in _names(injected, guards) if n != name))


def _wanted(injected: Injected, guards: Sequence[Guard], known: Known) -> Iterable[Setting]:
    yield Setting(injected)
    full = known.get(Setting(injected))
    if full is None or not full.took:
        return
    names = _names(injected, guards)
    yield from (Setting(injected, (name,)) for name in names)
    yield Setting(injected, names)
    if harmed(full) and full.ended == "went on":
        return  # nothing stops it: no guard can stand in another's way
    for name in names:
        without = known.get(Setting(injected, (name,)))
        if name != FILTER and without is not None and _difference(full, without) not in _STOPS:
            yield _alone(injected, name, guards)


def _act(injected: Injected, guard: Guard, guards: Sequence[Guard], known: Known) -> Act:
    full, without = known.get(Setting(injected)), known.get(Setting(injected, (guard.name,)))
    if full is None or not full.took:
        return "not tried"
    if without is None:
        return "does nothing"  # a line that this failure never came by
    act = _difference(full, without)
    if act == "only logs" and guard.kind not in _SPEAKING:
        act = "does nothing"
    alone = known.get(_alone(injected, guard.name, guards))
    none = known.get(Setting(injected, _names(injected, guards)))
    if act in _STOPS or alone is None or none is None:
        return act
    by_itself = _difference(alone, none)
    return by_itself if by_itself in _STOPS else act


def _difference(present: GuardTrial, absent: GuardTrial) -> Act:
    """Return what a guard does, from a trial with it and one that differs in its absence only."""
    ends = present.ended != "went on" and absent.ended == "went on"
    if harmed(absent) and not harmed(present):
        return "stops the write"
    if harmed(present) and not harmed(absent):
        return "makes it worse"
    if ends:
        return "stops after the write" if harmed(present) else "stops the write"
    if harmed(present) and _spreads(present, absent):
        return "makes it worse"
    if set(absent.bad_logs) - set(present.bad_logs) and present.ended == absent.ended:
        return "hides"
    return "only logs" if set(present.said) - set(absent.said) else "does nothing"


def _spreads(present: GuardTrial, absent: GuardTrial) -> bool:
    """Return whether more gradients are bad, or healthy ones are gone, with the guard than
    without it.
    """
    return (
        present.bad_gradients > absent.bad_gradients
        or present.zero_gradients > absent.zero_gradients
    )


def _host_act(injected: Injected, guards: Sequence[Guard], known: Known) -> Act:
    none = known.get(Setting(injected, _names(injected, guards)))
    if none is None or not none.took:
        return "not tried"
    if not harmed(none):
        return "stops the write"
    return "does nothing" if none.ended == "went on" else "stops after the write"


def _failure(
    full: GuardTrial | None, injected: Injected, stopped_by: tuple[str, ...]
) -> InjectedRow:
    if full is None or not full.took:
        return InjectedRow(
            injected=injected, tried=False, reaches_weights=False, outcome="could not be planted"
        )
    reaches = harmed(full)
    return InjectedRow(
        injected=injected,
        tried=True,
        reaches_weights=reaches,
        outcome=_outcome(full),
        stopped_by=() if reaches else stopped_by,
    )


def _outcome(full: GuardTrial) -> str:
    ends = {"went on": "training goes on", "stopped": "training stops", "raised": "training raises"}
    if not harmed(full):
        return f"kept from the weights, {ends[full.ended]}"
    after = ends[full.ended] if full.ended == "went on" else f"then {ends[full.ended]}"
    if full.bad_weights:
        return f"{_not_finite(full.bad_weights)}, {after}"
    if full.bad_state:
        return f"{full.bad_state} numbers of the optimizer's state are not finite, {after}"
    return f"weights move {full.growth:.1e} times as far as they should, {after}"


def _not_finite(num: int) -> str:
    return "1 weight is not finite" if num == 1 else f"{num} weights are not finite"
