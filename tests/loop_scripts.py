"""Training scripts without a word of nanstop in them, and a session that does what a test told
it to.
"""

import linecache
import runpy
from dataclasses import dataclass

import torch

from doubles.session import ScriptedSession
from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.hosts.script import autowatch
from nanstop.localize.localize import localize
from nanstop.records import Diagnosis, Report
from nanstop.replay.rerun import attempt, rerun
from nanstop.report.text.run_end import RunEnd
from nanstop.session.factory import opener
from nanstop.store.incidents import Store
from noticed import noticed


@dataclass
class Finding:
    """What a session learned of one failing micro-batch."""

    micro: int
    fidelity: str
    op: str = ""
    module: str = ""
    line: str = ""
    phase: str = ""


class ReplayingSession(ScriptedSession):
    """Replays and localizes each failing micro-batch like a real one, then answers as it was told
    to.

    ``found``: what it learned of each; ``refusals``: why a window could not be run again.
    """

    def __init__(self, *answers, **options):
        super().__init__(*answers, **options)
        self.found, self.refusals = [], []

    def failed(self, step, alarm, **details):
        try:
            for micro in range(len(step.batches)) if step is not None else ():
                if attempt(step, micro).failed:
                    self.found.append(finding(step, micro, raised=alarm.error is not None))
        except NanstopError as refusal:
            self.refusals.append(refusal.message)
        return super().failed(step, alarm, **details)


def finding(step, micro, *, raised):
    replay = rerun(step, micro, incident="", first_loss=step.losses[micro], raised=raised)
    found = Finding(micro, replay.fidelity)
    place = localize(step, micro)
    event = place and place.first_bad
    if event is not None:
        found.op, found.module, found.phase = event.op, event.module, event.phase
        source = event.source
        found.line = linecache.getline(source.file, source.line).strip() if source else ""
    return found


def run_script(path, source, session=None, **values):
    """Run a script as ``python SCRIPT`` would, watched where a session is given;
    return its variables.

    ``PARAMETERS`` of the script are returned as copies, with the random state at its end.
    """
    path.write_text(source)
    linecache.checkcache(str(path))
    if session is not None:
        autowatch.install(session)
    try:
        ending = runpy.run_path(str(path), init_globals=values, run_name="__main__")
    finally:
        autowatch.unwatch()
    return ending


def investigated(path, source, *, on_failure="observe", **values):
    """Run a script as ``nanstop run --policy ...`` would, in this process; return its variables
    and what was told.
    """
    news = []
    folder = path.parent / path.stem
    store = Store(folder, None)
    policy = Policy(on_failure=on_failure)
    opening = opener(policy, store, news.append, opened=autowatch.opened)
    return run_script(path, source, opening, **values), news


def assert_left_alone(folder, source):
    """Assert of a script without its fault that it hears nothing, and ends bitwise as alone."""
    plain = run_script(folder / "plain.py", source, BAD=False)
    healthy, news = investigated(folder / "healthy.py", source, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    assert healthy["losses"] == plain["losses"]
    assert same(healthy["PARAMETERS"], plain["PARAMETERS"])


def with_findings(folder, source):
    """Run a script in a folder as ``investigated`` does; return its variables and the findings."""
    ending, news = investigated(folder / "script.py", source)
    findings = [one for one in news if isinstance(one, Diagnosis)]
    return ending, noticed(findings, [one for one in news if isinstance(one, Report)])


def findings_of(folder, train):
    """What is told of a loop, a function of no arguments, that knows nothing of nanstop, by
    code.
    """
    sessions = []

    def opened(session):
        autowatch.opened(session)
        sessions.append(session)

    autowatch.install(opener(Policy(), Store(folder), lambda _: None, opened=opened))
    try:
        train()
    finally:
        autowatch.unwatch()
    assert all(report.trains_nothing for session in sessions for report in session.reports)
    return {
        finding.code: finding
        for session in sessions
        for finding in noticed(session.findings, session.reports)
    }


def weights(ending, *names):
    """Every parameter and buffer of the script's models (``net`` by default), in order."""
    return [
        t.detach().clone() for name in names or ("net",) for t in ending[name].state_dict().values()
    ]


def same(first, second):
    """Whether two lists of tensors are bitwise equal."""
    return len(first) == len(second) and all(map(torch.equal, first, second))
