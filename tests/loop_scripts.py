"""Training scripts without a word of nanstop in them, and a session that does what a test told it to."""

import linecache
import runpy
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from nanstop.decide.decision import Resolution
from nanstop.errors import NanstopError
from nanstop.hosts.script import autowatch
from nanstop.localize.localize import localize
from nanstop.replay.rerun import attempt, rerun


@dataclass
class Finding:
    """What a session learned of one failing micro-batch."""

    micro: int
    fidelity: str
    op: str = ""
    module: str = ""
    line: str = ""
    phase: str = ""


@dataclass
class ScriptedSession:
    """Replays and localizes like a real one, then resolves as it was told to; ``kind`` for every failure."""

    kind: str = "skip"
    look: bool = True
    atoms: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    sources: list = field(default_factory=list)
    findings: list = field(default_factory=list)
    refusals: list = field(default_factory=list)
    completed_steps: list = field(default_factory=list)
    left_out_steps: list = field(default_factory=list)
    bad_params: list = field(default_factory=list)
    learnt: list = field(default_factory=list)
    finished: int | None = None
    num_opened: int = 0
    series: object = field(default_factory=lambda: SimpleNamespace(add=lambda *_: None))

    def __call__(self, view, facts):
        self.view, self.facts = view, facts
        self.num_opened += 1
        return self

    def start(self):
        self.started = True

    def before_update(self, step):
        assert step is not None

    def learned(self, **facts):
        self.learnt.append(facts)

    def foresee(self, step, rewind):
        assert step is not None

    def gauge_due(self, step):
        return False

    def gauge(self, step):
        raise AssertionError("not due")

    def adopt(self, atoms):
        self.adopted = atoms

    def failed(self, step, signals, *, error=None, rewind=None, bad_params=(), **_):
        self.steps.append(step.id.step if step is not None else None)
        self.sources.append(tuple(s.source for s in signals))
        self.bad_params += bad_params
        self.rewind = rewind
        if self.look and step is not None:
            try:
                self._look(step, error)
            except NanstopError as refusal:
                self.refusals.append(refusal.message)
        return Resolution(kind=self.kind, atoms=self.atoms, reason="as told")

    def _look(self, step, error):
        for micro in range(len(step.batches)):
            if not attempt(step, micro).failed:
                continue
            first = step.losses[micro]
            replay = rerun(step, micro, incident="", first_loss=first, raised=error is not None)
            found = Finding(micro, replay.fidelity)
            place = localize(step, micro)
            event = place and place.first_bad
            if event is not None:
                found.op, found.module, found.phase = event.op, event.module, event.phase
                source = event.source
                found.line = linecache.getline(source.file, source.line).strip() if source else ""
            self.findings.append(found)

    def completed(self, step):
        self.completed_steps.append(step)

    def left_out(self, step):
        self.left_out_steps.append(step)

    def finish(self, exit_code=0):
        self.finished = exit_code


def run_script(path, source, session=None, **values):
    """Run a script as ``python SCRIPT`` would, watched where a session is given; return its variables.

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


def weights(ending, *names):
    """Every parameter and buffer of the script's models (``net`` by default), in order."""
    return [
        t.detach().clone() for name in names or ("net",) for t in ending[name].state_dict().values()
    ]


def same(first, second):
    """Whether two lists of tensors are bitwise equal."""
    return len(first) == len(second) and all(map(torch.equal, first, second))
