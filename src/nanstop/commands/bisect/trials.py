"""The trials of a bisect: each a training in a child process of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanstop.commands.bisect.configs import PLACES, Pair
from nanstop.commands.bisect.result import (
    BisectResult,
    KeyDifference,
    TrialOutcome,
    TrialRow,
    trial_line,
)
from nanstop.commands.bisect.search import Bisection, Judgement, Request
from nanstop.commands.bisect.trial_store import (
    INCIDENTS,
    LIVE,
    Failure,
    Finished,
    TrialStore,
    cannot_write,
    failures_so_far,
    read_end,
)
from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.process.children.executors import Executor, Running
from nanstop.process.children.isolate import ERRORS, BoundedCommand, End
from nanstop.process.crash import process_files
from nanstop.process.inject.variables import watching

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5
_LEAST_SECONDS = 60.0
"""Nothing is called a hang sooner, unless the user's own timeout says so."""
_QUIET = {"WANDB_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Of a trial's environment: no trial reports to a service."""
_TRIES = 3
"""How often a trial is started whose process ends without anybody knowing how."""
_JUDGEMENTS: Mapping[TrialOutcome, Judgement] = {"pass": "passes", "same_failure": "fails"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a bisect: seconds and bytes a trial, trials side by side, trials in all.

    Without a ``timeout`` a mixture may take ``patience`` times as long as the longer of BAD and
    GOOD; those two have none.
    """

    timeout: float | None = None
    patience: float = 10.0
    memory_bytes: int | None = None
    jobs: int = 1
    trials: int | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "patience", "memory_bytes", "jobs", "trials"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise NanstopError(f"{name} must be more than 0, not {value!r}")


class ForksDifferError(Exception):
    """A trial that was forked ended otherwise than the same one started by itself."""


@dataclass(slots=True)
class ChildTrials:
    """The trials of one bisect."""

    pair: Pair
    store: TrialStore
    limits: Limits
    announce: Callable[[str], None]
    executor: Executor
    rows: list[TrialRow] = field(default_factory=list)
    target: Failure | None = None
    running: dict[str, Running] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    next_look: float = 0.0

    def run(self, requests: Sequence[Request]) -> list[Judgement]:
        """Run these trials, ``limits.jobs`` at a time, and return their judgements."""
        digests = [self.store.digest(self._settings(one), one.attempt) for one in requests]
        known = {digest: found for digest in digests if (found := self._known(digest))}
        finished = known | self._run_new(
            {d: r for d, r in zip(digests, requests, strict=True) if d not in known}
        )
        return [
            self._note(request, digest, finished[digest], known=digest in known)
            for request, digest in zip(requests, digests, strict=True)
        ]

    def result(self, found: Bisection, seconds: float) -> BisectResult:
        """Return the whole outcome with what the search found."""
        keys = self.pair.keys
        return BisectResult(
            status=found.status,
            message=self._message(found),
            minimal=keys(found.minimal),
            sufficient_fix=keys(found.sufficient_fix),
            inseparable=keys(found.inseparable),
            failure=self._explained(),
            flaky=tuple(keys(one) for one in found.flaky),
            differences=tuple(
                KeyDifference(key=key, bad=bad, good=good)
                for key, (bad, good) in self.pair.values(self.pair.items).items()
            ),
            trials=tuple(self.rows),
            seconds=seconds,
            folder=str(self.store.folder),
            problem=self.store.problem,
            not_forked=self.executor.why_not,
        )

    def _explained(self) -> Failure | None:
        """Return the failure that was looked for, as the trial saw it that knows most of it."""
        same = (row.failure for row in reversed(self.rows) if row.outcome == "same_failure")
        return next((one for one in same if one is not None and one.key is not None), self.target)

    def _settings(self, request: Request) -> dict[str, Any]:
        return self.pair.mixed(name for name in self.pair.items if name in request.keys)

    def _known(self, digest: str) -> Finished | None:
        found = self.store.load(digest)
        limits = self.limits
        if found is None or (found.forked and not self.executor.forks):
            return None
        holds = found.holds(timeout=self._timeout(), memory_bytes=limits.memory_bytes)
        return found if holds else None

    def _run_new(self, waiting: Mapping[str, Request]) -> dict[str, Finished]:
        """Run trials until all have ended; on any exception end those that run."""
        queue, finished = list(waiting.items()), {}
        try:
            while queue or self.running:
                while queue and len(self.running) < self.limits.jobs:
                    digest, request = queue.pop(0)
                    self.running[digest] = self._start(digest, request)
                time.sleep(_POLL_SECONDS)
                for digest, end, forked in self._ended():
                    del self.running[digest]
                    if end.kind == "lost":
                        self._count_loss(digest, end)
                        queue.append((digest, waiting[digest]))
                    else:
                        finished[digest] = self._finish(digest, end, forked=forked)
        finally:
            for child in self.running.values():
                child.stop()
            self.running.clear()
        return finished

    def _count_loss(self, digest: str, end: End) -> None:
        self.losses[digest] = self.losses.get(digest, 0) + 1
        if self.losses[digest] >= _TRIES:
            why = f" ({end.message})" if end.message else ""
            raise NanstopError(
                f"whoever ran trial {digest} was gone {_TRIES} times before the trial ended{why}",
                hint="look for what ends processes here: memory, a scheduler, a node that left",
            )

    def _start(self, digest: str, request: Request) -> Running:
        place = self.store.begin(digest)
        settings = self.pair.placed(self._settings(request), place)
        try:
            command = self.pair.form.command(settings, place)
            bounded = BoundedCommand(
                command=command,
                folder=place,
                environment=_environment(place, record=self._recorded(request)),
                timeout=self._timeout(),
                memory_bytes=self.limits.memory_bytes,
                alone=self._alone(request),
            )
        except OSError as error:
            raise cannot_write(self.store.folder, error) from error
        return self.executor.start(bounded)

    def _alone(self, request: Request) -> bool:
        """Return whether a trial is as by hand: BAD and GOOD are, and what confirms an answer."""
        return request.attempt > 0 or len(request.keys) in (0, len(self.pair.items))

    def _timeout(self) -> float | None:
        """Return the seconds a trial may take.

        As given, else many times what BAD and GOOD took, once both are known.
        """
        ends = [row.seconds for row in self.rows if len(row.keys) in (0, self._num_keys)]
        if self.limits.timeout is not None or len(ends) < 2:
            return self.limits.timeout
        return max(self.limits.patience * max(ends[:2]), _LEAST_SECONDS)

    @property
    def _num_keys(self) -> int:
        return len(self.pair.keys(self.pair.items))

    def _recorded(self, request: Request) -> bool:
        """Return whether a trial notes each operation: only a confirming one, for it costs time."""
        died = self.target is not None and self.target.kind in ("signal", "timeout")
        return died and request.attempt > 0

    def _ended(self) -> list[tuple[str, End, bool]]:
        """Return the trials that have ended, or whose answer is there already.

        Nothing after it would change it. With each whether it was forked.
        """
        looking = time.monotonic() >= self.next_look
        if looking:
            self.next_look = time.monotonic() + _LOOK_SECONDS
        ended = []
        for digest, child in self.running.items():
            end = child.poll()
            if end is None and looking and self._answered(child):
                end = child.stop()
            if end is not None:
                ended.append((digest, end, child.forked))
        return ended

    def _answered(self, child: Running) -> bool:
        target = self.target
        if target is None or target.kind != "nonfinite":
            return False
        return any(one.same_as(target) for one in failures_so_far(child.folder))

    def _finish(self, digest: str, end: End, *, forked: bool) -> Finished:
        place = self.store.place(digest)
        memory_bytes = self.limits.memory_bytes
        finished = replace(read_end(place, end), memory_bytes=memory_bytes, forked=forked)
        for name in PLACES:  # checkpoints of a trial are of no use
            shutil.rmtree(place / name, ignore_errors=True)
        self.store.keep(digest, finished)
        return finished

    def _note(self, request: Request, digest: str, finished: Finished, *, known: bool) -> Judgement:
        """Write the trial into the list and return its judgement.

        The first failure of BAD is the one looked for; where BAD passes, that of GOOD.
        """
        failures = finished.failures
        if self.target is None and len(request.keys) in (0, len(self.pair.items)) and failures:
            self.target = failures[0]
        outcome = self._outcome(finished)
        same = (one for one in failures if outcome == "same_failure" and one.same_as(self._sought))
        row = TrialRow(
            number=len(self.rows) + 1,
            keys=self.pair.keys(name for name in self.pair.items if name in request.keys),
            attempt=request.attempt,
            outcome=outcome,
            failure=next(same, failures[0] if failures else None),
            end=finished.end.name or finished.end.kind,
            code=finished.end.code,
            steps=finished.steps,
            seconds=finished.end.seconds,
            peak_bytes=finished.end.peak_bytes,
            known=known,
            forked=finished.forked,
            folder=digest,
        )
        self.rows.append(row)
        self.announce(trial_line(row, self.pair.keys(self.pair.items)))
        if self._deceived(row):
            raise ForksDifferError
        return _JUDGEMENTS.get(outcome, "unresolved")

    def _deceived(self, row: TrialRow) -> bool:
        """Return whether a trial that was started by itself ended otherwise than the same one as
        a fork.
        """
        same = (one for one in self.rows if one.keys == row.keys and one.forked)
        return (
            self.executor.forks
            and not row.forked
            and any(one.outcome != row.outcome for one in same)
        )

    @property
    def _sought(self) -> Failure:
        assert self.target is not None
        return self.target

    def _outcome(self, finished: Finished) -> TrialOutcome:
        if not finished.failures:
            return "pass"
        if self.target and any(one.same_as(self.target) for one in finished.failures):
            return "same_failure"
        began = finished.steps > 0 or finished.failures[0].kind not in ("exception", "exit")
        return "other_failure" if began else "invalid"

    def _message(self, found: Bisection) -> str:
        errors = self.store.folder / (self.rows[-1].folder if self.rows else "") / ERRORS
        seen = f"the last trial wrote {errors}"
        return {
            "found": "",
            "bad_passes": "BAD does not fail: it was run twice and passed both times; "
            "if it fails only sometimes or only later, give it more steps",
            "swapped": f"BAD passes and GOOD fails ({self._last_failure()}), each twice: are they "
            "swapped? Give them the other way round; these trials are kept",
            "good_fails": f"GOOD fails as well ({self._last_failure()}), so the two cannot be told "
            f"apart; {seen}",
            "flaky": "the same configuration ended differently when it was run again, so nothing "
            "below is established; fix the seed, or look at the flaky trials",
            "limit": f"stopped after {found.num_trials} trials, as --limit says; the keys below "
            "are the smallest set seen to fail, and the trials are kept for the next bisect",
        }[found.status]

    def _last_failure(self) -> str:
        failures = [row.failure for row in self.rows if not row.keys and row.failure]
        return str(failures[-1]) if failures else ""


def _environment(place: Path, *, record: bool) -> dict[str, str]:
    """Return a trial's environment: watched, observed only, no time spent on a cure.

    ``record``: its operations are noted in a file that outlives it. Errors: ``OSError``.
    """
    policy = Policy(on_failure="observe", budget_seconds=0)
    path = os.environ.get("PYTHONPATH", "")
    own = {name: value for name, value in os.environ.items() if name != "NANSTOP"}
    given = own | _QUIET | watching(policy, place / INCIDENTS, secrets.token_hex(8), path)
    if record:
        (place / LIVE).mkdir()
        given |= {process_files.FOLDER: str(place / LIVE), process_files.RECORD: "1"}
    return given
