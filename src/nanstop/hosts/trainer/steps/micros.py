"""The micro-batches of a trainer, with what a run of them again needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nanstop.hosts.sharded.models import reduces
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.trainer.steps.made_within import Held
from nanstop.hosts.window.ending import Ending
from nanstop.hosts.window.remedies import WindowRemedies
from nanstop.records import SourceLine
from nanstop.replay import state_diff
from nanstop.replay.collectives import Collectives
from nanstop.replay.rng import RngState


@dataclass(slots=True)
class TrainerMicro:
    """One call of ``training_step``.

    Noted between its ``_prepare_inputs`` and its loss: replays start there.

    ``before`` and ``after`` are notes of the trainer, ``after`` at the end of the call; ``batch``
    is a shallow copy of what ``_prepare_inputs`` returned, None where it raised (``rng`` is of its
    beginning then, in a trainer that makes its batches there). ``advanced``: it moved on to the
    next buffered slice as well. ``taped``: the calls of a loss of the script's own. ``whole``: its
    step does not go through ``_prepare_inputs``: it is noted at its beginning, and ``batch`` is of
    ``raw``. ``made``: see ``MadeWithin``. ``remembered``: before it, see ``Remembered``.
    """

    model: nn.Module
    raw: Any
    num_items: Any
    sync: bool
    batch: Any = None
    advanced: bool = False
    rng: RngState | None = None
    before: state_diff.Notes = state_diff.NOTHING
    after: state_diff.Notes = state_diff.NOTHING
    remembered: state_diff.Notes = state_diff.NOTHING
    buffers: Any = ()
    loss: Tensor | None = None
    taped: TapedMicro | None = None
    whole: bool = False
    made: list[Held] = field(default_factory=list)
    reduced: bool = field(init=False)
    """See ``hosts.loop.step.Micro``."""

    def __post_init__(self) -> None:
        self.reduced = self.sync and reduces(self.model)


@dataclass(slots=True)
class TrainerWindow:
    """The micro-batches of one optimizer step.

    ``logged``: the trainer's running loss before the first of them. ``rewritten_at``: see
    ``HostStep``.
    """

    index: int
    lrs: tuple[float, ...]
    logged: Tensor
    micros: list[TrainerMicro] = field(default_factory=list)
    remedies: WindowRemedies = field(default_factory=WindowRemedies)
    collectives: Collectives = field(default_factory=Collectives)
    ending: Ending = field(default_factory=Ending)
    rewritten_at: tuple[SourceLine, ...] | None = None

    @property
    def closed(self) -> bool:
        return bool(self.micros) and self.micros[-1].sync

    @property
    def replayable(self) -> bool:
        """Whether every micro-batch was noted where a run of it again starts: trainers with a loop
        of their own may go past ``_prepare_inputs``.
        """
        return all(m.batch is not None for m in self.micros)

    def touched(self) -> set[str]:
        """Return the trainer attributes that the steps themselves changed."""
        return set().union(*[state_diff.changed(m.before, m.after) for m in self.micros])

    def trim(self) -> None:
        """Let go of notes that no replay of this window needs."""
        names = self.touched()
        for micro in self.micros:
            micro.before, micro.after = micro.before.only(names), micro.after.only(names)
