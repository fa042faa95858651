"""A failure: as it was met, run again, and traced to where it was born."""

from __future__ import annotations

from bisect import bisect_right

from nanstop.records.facts import BatchFact, Environment, RunFacts
from nanstop.records.of_commands.probe import StateRow
from nanstop.records.record import record
from nanstop.records.values import (
    FailureKey,
    OpEvent,
    Series,
    Signal,
    SourceLine,
    StepId,
    TensorStats,
)
from nanstop.records.vocabulary import (
    SCHEMA,
    Confidence,
    Fidelity,
    Finiteness,
    HiddenChoice,
    Origin,
    Phase,
)


@record
class BatchRows:
    """The rows of a data set that a micro-batch was made of, from 0.

    ``data``: what they are rows of. ``rows``: in the order of its samples, or, not ``in_order``, in
    that of the loader. ``starts``: of samples that were joined into one row, their first tokens.
    ``by_row``: whether samples are several sequences of each row, in an order that is not known,
    and what has one value for each row has them in the order of ``rows``. ``unmade_at``: the
    line of the script that makes numbers of these rows that are not finite, where they are made
    again, and of the others none. ``mended_as``: the guarded form of that line, or the number in
    place of its infinities, with which they are finite where they are made again, and all else of
    the batch is as it was; "" where none is known.
    """

    data: str
    rows: tuple[int, ...]
    in_order: bool = True
    starts: tuple[int, ...] = ()
    by_row: bool = False
    unmade_at: SourceLine | None = None
    mended_as: str = ""

    def row(self, sample: int, token: int | None = None) -> int | None:
        """Return the row of a sample, of a token where samples were joined; None: not known."""
        if not self.in_order:
            return None
        if not self.starts:
            return self.rows[sample] if sample < len(self.rows) else None
        if token is None or sample > 0:
            return None
        return self.rows[max(bisect_right(self.starts, token) - 1, 0)]


@record
class WindowApart:
    """One window before a failure whose ``loss`` is far from the ``usual`` one of the others, with
    the weights of before them all. Made anew without its update, ``num_updates`` take the loss from
    ``begin`` to ``end``. ``fact``: the entry of its batch of which one sample is farthest from
    the others, None where it has none; ``rows``: what that batch was made of.
    """

    step: int
    loss: float
    usual: float
    begin: float
    end: float
    num_updates: int
    fact: BatchFact | None = None
    rows: BatchRows | None = None


@record
class Incident:
    """A failure as it was met, before anything was tried."""

    schema: int = SCHEMA
    id: str
    at: StepId
    phase: Phase
    signals: tuple[Signal, ...]
    facts: RunFacts
    environment: Environment
    batch: tuple[BatchFact, ...] = ()
    rows: BatchRows | None = None
    """What the failing micro-batch was made of; None where that is not known."""
    without_value: tuple[SourceLine, ...] = ()
    """Lines of the script at which NumPy has warned that an operation has no finite value."""
    text: tuple[str, ...] = ()
    """What stands around each place of the localization, where that was asked for."""
    bad_params: tuple[str, ...] = ()
    """Parameters that were not finite before this step's forward."""
    bad_state: tuple[str, ...] = ()
    born_on: tuple[int, ...] | None = None
    """Ranks whose own part of the step fails; () where none does, so that what they exchanged is
    bad; None where they were not asked.
    """
    rewritten_at: tuple[SourceLine, ...] | None = None
    """Lines of the script that write to gradients between their backward and the update, as far as
    they are known; None where nothing was written in this step.
    """
    remade_finite: int | None = None
    """The step before, where its update and those since a snapshot, made again, leave finite the
    weights that were found not to be; None where that is not so, or not known.
    """
    written_by: tuple[SourceLine, ...] = ()
    """What of the script was seen to write to ``bad_params`` outside of an update, in order; ()
    where nothing was, or of one of them nothing.
    """
    put_right: tuple[str, ...] = ()
    """Parameters that were not finite and were given ordinary numbers for the runs of this step:
    its update breaks some of them again. The one that broke them could not be made again.
    """
    odd_weights: tuple[TensorStats, ...] = ()
    """Weights that were far too large when the step failed."""
    apart: WindowApart | None = None
    """The window whose batch alone led to the failure."""
    lost_moments: tuple[StateRow, ...] = ()
    """Second moments that a rehearsed update kept as 0, and its like in float32 did not."""
    snapshot: None = None
    """Nothing is kept of a step but what the report says; the field stays in its published form."""
    history: tuple[Series, ...] = ()
    time: float = 0.0

    def __repr__(self) -> str:
        met = ", ".join(dict.fromkeys(f"{one.source} {one.value}" for one in self.signals))
        at = f"step {self.at.step}, micro-batch {self.at.micro}, rank {self.at.rank}"
        return f"<incident {self.id}: {met or 'failed'} in {self.phase}, {at}>"


@record
class Replay:
    """The failing micro-batch run again bare. ``eager``: finiteness with compilation off."""

    incident: str
    fidelity: Fidelity
    runs: int
    num_failed: int | None = None
    """How many of the runs failed; None in records of a time when that was not noted."""
    key: FailureKey | None = None
    loss: float | None = None
    digest: str = ""
    eager: Finiteness = "unknown"
    private_rng: bool = False
    """A generator of the run's own was seen: a different replay is then no evidence of a race."""
    seconds: float = 0.0
    note: str = ""


@record
class Position:
    """A sample (row of the batch) and its first and last bad token; None without such an axis."""

    sample: int
    first_token: int | None = None
    last_token: int | None = None


@record
class Localization:
    """Where the failure was born.
    ``culprit``: parameter, batch entry, state or variable of the script when it was bad before any
    op ran. ``made``: the line that gave such a variable its value, or wrote it down.
    ``made_before``: whether that was before the step. Of origin "carried_over" it is the line that
    gives the variable a new value in each step. ``is_written``: whether ``made``, or the line of
    the first bad op, itself writes a number down that is not finite, like the one that was read.
    """

    key: FailureKey
    first_bad: OpEvent | None
    origin: Origin
    confidence: Confidence | None = None
    """Of the place: certain where the failure was gone with the operation's result put right; None
    in records of a time when that was not noted.
    """
    culprit: str | None = None
    made: SourceLine | None = None
    made_before: bool = False
    is_written: bool = False
    reaches: tuple[str, ...] = ()
    """What the bad value spoiled: "loss", or names of parameters (their gradient or value)."""
    growth: tuple[OpEvent, ...] = ()
    positions: tuple[Position, ...] | None = None
    """None: unknown (the op's axes are not those of the batch)."""
    in_every_sample: bool = False
    """Whether the first bad op is bad in each sample of the micro-batch."""
    absorbed: tuple[OpEvent, ...] = ()
    """Overflows that turned back into finite numbers downstream."""
    masks: tuple[OpEvent, ...] = ()
    """Operations on finite operands whose -inf the first bad op read as a mask; no fills."""
    vanished: OpEvent | None = None
    """The operation that should have kept a divisor from 0, by a number that its format rounds to
    0; or that has rounded to 0 what a logarithm is taken of, or a divisor that is not 0 in float64.
    """
    exploded: OpEvent | None = None
    """The exponential whose result, multiplied on, left the format at the first bad op."""
    filled: OpEvent | None = None
    """The fill by which the program wrote the infinity that the first bad op was given."""
    emptied: OpEvent | None = None
    """The operation of an earlier line that left no element of what the first bad op reads."""
    hidden: HiddenChoice = ""
    """What the first bad op makes of choices that an infinity hides, where it is bad by them."""
    held_in: str = ""
    """The variable of the script, or the buffer, that has held that infinity since before the step;
    the one that holds a bad entry of the batch.
    """
    held_at: SourceLine | None = None
    """The line that gave that variable its value, where the source says."""
    unmade_at: SourceLine | None = None
    """The line of the script that makes numbers of the variable that are not finite, where the
    statements that gave it its value are run again.
    """
    mended_as: str = ""
    """The form of that line with which they are finite there, and all else is as it was."""
    held_read: OpEvent | None = None
    """The operation that read the infinity of that variable."""
    readers: tuple[SourceLine, ...] = ()
    """Lines whose operations read what was not finite before any op ran, or what came of it, and
    hand it on, in order: the first few.
    """
    in_float64: Finiteness = "unknown"
    """The first bad op's result where all that it goes back to is computed in float64."""
    counted: tuple[str, ...] = ()
    """Entries of the batch that the first bad op's divisor was made of, where that is a count."""
    weighs_choices: bool = False
    """Whether the culprit is multiplied with log-probabilities of what was chosen, or with ratios
    of them: as a reward is.
    """
    of_another_model: bool = False
    """Whether the culprit is a parameter of a model that the step calls and that is not the trained
    one: a reference, a teacher.
    """
    unseen_write: Finiteness | None = None
    """None, or the line of the first bad op writes where torch dispatches nothing: its inputs are
    what that line can read, its outputs what it leaves, and the value is what it leaves where it
    reads ordinary numbers.
    """
    num_ops: int = 0
    blind_spots: tuple[str, ...] = ()
    seconds: float = 0.0
