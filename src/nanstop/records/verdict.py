"""What was concluded of a failure, what was tried against it, and what was done."""

from __future__ import annotations

import math
from dataclasses import replace

from nanstop.records.account import GradientAccount
from nanstop.records.facts import Environment, RangeRow, RunFacts
from nanstop.records.incident import Incident, Localization, Replay
from nanstop.records.of_commands.checkpoint import CheckpointScan
from nanstop.records.of_commands.probe import Probe
from nanstop.records.record import record
from nanstop.records.values import FailureKey, OpEvent, Series, SourceLine, StepId
from nanstop.records.vocabulary import (
    OF_UPDATES,
    SCHEMA,
    ActionKind,
    ChangeKind,
    Confidence,
    Finiteness,
    Outcome,
    Phase,
    Safety,
    Verdict,
)


@record
class Atom:
    """The smallest switch: a remedy of ``remedies.apply.TABLE``, its target and its value."""

    remedy: str
    target: str = ""
    value: str = ""

    def __str__(self) -> str:
        inside = ", ".join(part for part in (self.target, self.value) if part)
        return f"{self.remedy}({inside})" if inside else self.remedy


@record
class Trial:
    """One run of the failing micro-batch under some atoms. Gaps: distances to float32."""

    atoms: tuple[Atom, ...]
    outcome: Outcome
    micro: int = 0
    key: FailureKey | None = None
    loss: float | None = None
    loss_gap: float | None = None
    grad_cosine: float | None = None
    grad_gap: float | None = None
    """Distance of one parameter's gradient, over the norm of its float32 gradient:
    the largest of all parameters.
    """
    causal: bool | None = None
    rows_unchanged: bool | None = None
    """Whether every healthy row kept its loss and gradient, or all but the outputs of token rows
    that a cure makes anew; asked where float32 fails too.
    """
    seconds: float = 0.0
    peak_bytes: int | None = None
    message: str = ""


@record
class Change:
    """A small change of what the first bad operation reads, in a replay.

    ``operand``: its place among the operation's inputs. "raise_zeros": what is 0 becomes ``value``;
    "fill_rows": the first entry of each row, or else of each first index, that is 0 throughout
    does; "bound": magnitudes end at ``value``; "unmask": of rows that hide everything, one entry
    does no longer; "supervise": of labels that are all ignored, one becomes class ``value``;
    "vary": a ramp from 0 to ``value`` is added; "exponentiate": logarithms become their
    exponentials, where these sum to ``value``.
    """

    kind: ChangeKind
    operand: int
    value: float = 1.0


@record
class Experiment:
    """What followed from a change that a finding had named. ``outcome``: of the operation's result;
    "unknown" where the change could not be made.
    """

    code: str
    change: Change
    outcome: Finiteness


@record
class Evidence:
    """All a rule may look at; every field is optional.

    ``at``: the step of a run that has not failed in which something was measured or read anew.
    ``learned``: fields of ``facts`` that were read there. ``refusal``: the message of an exception
    that the run's own code raised there. ``accounts``: the last ones of one optimizer, in order.
    ``told``: codes of what is more than possible of the run already. ``is_over``: the run has come
    to its own end.
    """

    facts: RunFacts | None = None
    environment: Environment | None = None
    incident: Incident | None = None
    replay: Replay | None = None
    localization: Localization | None = None
    ranges: tuple[RangeRow, ...] = ()
    series: tuple[Series, ...] = ()
    trials: tuple[Trial, ...] = ()
    experiments: tuple[Experiment, ...] = ()
    probe: Probe | None = None
    accounts: tuple[GradientAccount, ...] = ()
    checkpoint: CheckpointScan | None = None
    at: StepId | None = None
    learned: tuple[str, ...] = ()
    refusal: str = ""
    told: tuple[str, ...] = ()
    is_over: bool = False


@record
class Sighting:
    """Where in a run that has not failed something was first seen.
    ``step`` and ``micro`` count from 0.

    None: not known, or (``micro``) of a whole window. ``op``: as torch prints it.
    """

    step: int
    micro: int | None = None
    phase: Phase | None = None
    op: str | None = None


@record
class Diagnosis:
    """What a rule concluded. ``remedies``: candidate sets of atoms, in the order to try.

    ``confidence`` is that of the cause; where a failure began is the localization's to say.
    ``confirmed``: the experiment that bore the cause out, or the fact that leaves no other; ""
    where there was none. ``usual_cure``: the first that the finding's page names, which nobody has
    tried on this run.
    """

    code: str
    title: str
    cause: str
    confidence: Confidence
    confirmed: str = ""
    lines: tuple[str, ...] = ()
    remedies: tuple[tuple[Atom, ...], ...] = ()
    page: str = ""
    usual_cure: str = ""
    where: str = ""
    accompanied_by: tuple[str, ...] = ()
    seen: Sighting | None = None
    """Where it was measured; None for what was only to be expected, and for a failure."""
    source: SourceLine | None = None
    """The line to look at; None where none is known."""
    of_updates: bool = False
    """Whether ``remedies`` are for the updates that led to a failure, and no change of the step
    that fails cures it."""
    mended_by: str = ""
    """The code of another finding of the run whose help mends it too: of one cause; "" else."""
    measured_by: str = ""
    """The code of the finding that the first updates of a run show of the same cause, where this
    one is only to be expected; "" else."""
    at_source: Atom | None = None
    """A form of the line that made the batch so, with which its rows are finite where they are made
    again; no run of the step can try it."""
    trains_nothing: bool = False
    """Whether by it no update changes what it is to change: an incident, though every number is
    finite."""

    def at(self, source: SourceLine | None) -> Diagnosis:
        """Return it with the line of the script that it is about, whose text stands ahead of the
        advice; as it is where no such line is known. Advice that says nothing is left out.
        """
        text, where = (source.quoted, source.short) if source is not None else ("", self.where)
        lines = tuple(filter(None, (text, *self.lines)))
        return replace(self, lines=lines, where=where, source=source)

    def __repr__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"<{self.code} {self.title}{where}, {self.confidence}>"


@record
class Reference:
    """The exact run of the same micro-batch and the tolerances that a cure must keep.

    ``dtype``: float32, or float64 where float32 fails and that does not.
    """

    outcome: Outcome
    dtype: str = "float32"
    loss: float | None = None
    loss_tolerance: float = 0.0
    cosine_tolerance: float = 0.0
    grad_tolerance: float = math.inf
    source: str = ""
    """Where the tolerances come from: a healthy micro-batch of the same run, or the format."""
    num_draws: int = 0
    """Ops that drew at random in the failing run: they give all trials the numbers of that run."""
    num_choices: int = 0
    """Ops that chose by finite values (top-k, sort, comparisons): as there, in all trials."""
    without_casts: bool = False
    """Whether casts of the script to half precision are left out, without which it passes."""
    still_in: str = ""
    """Where it fails: the half format that a part of it computed in all the same, which casts by
    itself; then it says nothing of float32.
    """
    fails_in: tuple[str, ...] = ()
    """The formats in which it was run and failed."""

    @property
    def widest(self) -> str:
        """The widest format that it was run in."""
        return self.fails_in[-1] if self.fails_in else self.dtype


@record
class Alternative:
    """Another set of atoms that passes, with its class and its distance to float32."""

    atoms: tuple[Atom, ...]
    safety: Safety
    passed: int
    runs: int
    loss_gap: float | None = None
    grad_cosine: float | None = None


@record
class Proof:
    """What was tried on the failing micro-batch. ``minimal`` is the cure;
    removing any of its atoms fails again.

    ``isolated``: ``minimal`` leaves out what fails, which cures nothing. ``chance``: the step as it
    is, or the same cure, did not end twice alike: no verdict on any cure can be had from it.
    """

    incident: str
    verdict: Verdict
    minimal: tuple[Atom, ...]
    baseline: Trial | None = None
    passing: tuple[Trial, ...] = ()
    ablations: tuple[Trial, ...] = ()
    tried: tuple[Trial, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    reference: Reference | None = None
    cost: str = ""
    safety: Safety = "safe"
    scope: str = "micro-batch"
    """What was run: ``vocabulary.OF_UPDATES``, or a part of the failing step."""
    next_experiment: str = ""
    chance: bool = False
    seconds: float = 0.0
    typed: tuple[Atom, ...] | None = None
    """The forms of lines, those of the cure or others that passed, whose code gives on the failing
    step what they give; empty where none does, None where that could not be run.
    """

    def is_at(self, event: OpEvent | None) -> bool:
        """Return whether the proven cure changes nothing but the module or the line of an
        operation: then that is where the failure is made, whatever follows from it.
        """
        if self.verdict != "proven" or event is None:
            return False
        line = f"{event.source.file}:{event.source.line}" if event.source is not None else ""
        changed = {atom.target for atom in self.minimal}
        return "" not in changed and changed in ({event.module}, {line})

    @property
    def is_of_updates(self) -> bool:
        """Whether it made the updates anew that had led to the failure."""
        return self.scope == OF_UPDATES


@record
class Action:
    kind: ActionKind
    atoms: tuple[Atom, ...] = ()
    reason: str = ""
    proof: str | None = None


@record
class AuditEntry:
    """What was done about a failure.

    ``outcome``: "done", "failed: " and why, "" where there was nothing to do. ``before`` and
    ``after``: the loss of the failing micro-batch, or else the norm of the gradients, as far as
    known.
    """

    at: StepId
    action: Action
    outcome: str = ""
    before: str = ""
    after: str = ""
    incident: str | None = None


@record
class Report:
    """Everything about one incident: the public, versioned ``report.json``."""

    schema: int = SCHEMA
    incident: Incident
    replay: Replay | None = None
    localization: Localization | None = None
    experiments: tuple[Experiment, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    proof: Proof | None = None
    audit: tuple[AuditEntry, ...] = ()
    count: int = 1
    failures: tuple[str, ...] = ()
    """Stages of the investigation that did not complete, with the reason."""

    @property
    def led_here(self) -> bool:
        """Whether a remedy was proven on the updates that had led to the failure."""
        return self.proof is not None and self.proof.is_of_updates

    @property
    def trains_nothing(self) -> bool:
        """Whether it is of a run that does not train, and not of a step that failed."""
        return bool(self.diagnoses) and self.diagnoses[0].trains_nothing

    def __repr__(self) -> str:
        what = f"{self.diagnoses[0].code} {self.diagnoses[0].title}" if self.diagnoses else "NS000"
        times = f", {self.count} times" if self.count > 1 else ""
        return f"<incident {self.incident.id}: {what}, step {self.incident.at.step}{times}>"
