"""A session that does as a test tells it and keeps what a host tells it.
``test_watched_run`` holds it to the Protocol.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

from nanstop.decide.decision import Decision
from nanstop.session.history import History
from nanstop.session.off import OffSession
from nanstop.tracing.module_ranges import ModuleRanges


class KeptHistory(History):
    """A history that also keeps every value as it was added, and every log."""

    def __init__(self):
        super().__init__()
        self.values, self.logged = [], []

    def add(self, name, step, value):
        super().add(name, step, value)
        self.values.append((name, step, value))

    def take_back(self, name, num):
        super().take_back(name, num)
        for place in [i for i, (known, *_) in enumerate(self.values) if known == name][-num:][::-1]:
            del self.values[place]

    def log(self, step, entry):
        super().log(step, entry)
        self.logged.append((step, entry))

    def of(self, name):
        return [v for n, _, v in self.values if n == name]


class ScriptedSession(OffSession):
    """Answers each failure with the next of ``answers``, the last one for good;
    with "skip" where there is none.

    ``inspect``: called with the step of each failure and the way back. ``gauge_at``: the step
    that is gauged; every other has a narrow look then.
    """

    def __init__(
        self,
        *answers,
        atoms=None,
        on_stop="raise",
        inspect=None,
        go_on_after_refusal=True,
        gauge_at=None,
    ):
        super().__init__()
        self.series = KeptHistory()
        self.answers, self.atoms, self.on_stop = list(answers) or ["skip"], atoms or {}, on_stop
        self.inspect, self.go_on_after_refusal = inspect, go_on_after_refusal
        self.gauge_at, self.tap, self.looks = gauge_at, None, []
        self.failures, self.completed_steps, self.left_out_steps = [], [], []
        self.learnt, self.exceptions, self.refused, self.outcomes = [], [], [], []
        self.num_opened = self.num_logged = 0
        self.adopted, self.finished = (), None

    def open(self, view, facts):
        self.view, self.facts = view, facts
        self.num_opened += 1
        return self

    def __call__(self, view, facts):
        return self.open(view, facts)

    @property
    def may_leave_out(self):
        return True

    @property
    def steps(self):
        """Where each failure was met, None for one that cannot be run again."""
        return [f.step.id.step if f.step is not None else None for f in self.failures]

    @property
    def sources(self):
        return [tuple(s.source for s in f.signals) for f in self.failures]

    @property
    def bad_params(self):
        return [name for f in self.failures for name in f.bad_params]

    def start(self, *, trains=True):
        self.finished = None

    def failed(self, step, alarm, *, rewind=None, **_):
        told = {one.name: getattr(alarm, one.name) for one in fields(alarm)}
        self.failures.append(SimpleNamespace(step=step, rewind=rewind, **told))
        if self.inspect is not None:
            self.inspect(step, rewind)
        kind = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Decision(kind=kind, reason="as told", atoms=self.atoms, on_stop=self.on_stop)

    def carried_out(self, decision, outcome, *, before="", after=""):
        self.outcomes.append((decision.kind, outcome, before, after))

    def adopt(self, atoms):
        self.adopted = atoms

    def learned(self, *, at=None, **facts):
        self.facts = replace(self.facts, **facts)
        self.learnt.append(facts)

    def raised(self, at, error):
        self.exceptions.append((at.step, at.micro, error))

    def before_update(self, step):
        assert step is not None

    def foresee(self, step, rewind):
        assert step is not None

    def gauge_due(self, step):
        return step == self.gauge_at

    def gauge(self, step):
        assert self.gauge_at is not None
        with step.isolated():
            step.run(0)

    def audit(self, step, ranks):
        assert step is not None

    def logged(self):
        self.num_logged += 1

    def completed(self, step, *, optimizer=None):
        self.completed_steps.append(step)
        if self.gauge_at is not None:  # a narrow look at every step
            self.looks += [self.tap.read()] if self.tap is not None else []
            self.tap = ModuleRanges(self.view.root)
            self.tap.attach()

    def left_out(self, step, *, optimizer=None):
        self.left_out_steps.append(step)

    def checkpoint_refused(self, path, bad_params, last_good):
        self.refused.append((path, bad_params, last_good))
        return Decision(kind="proceed" if self.go_on_after_refusal else "stop")

    def finish(self, exit_code=0):
        self.finished = exit_code
        if self.tap is not None:
            self.tap.detach()
