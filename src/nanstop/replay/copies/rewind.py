"""The way back from weights that an update breaks:
a snapshot now and then, and the windows since.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.frozen import frozen
from nanstop.numerics.tensors import bad_mask, by_torch_alone, bytes_of, is_measurable, nonfinite
from nanstop.replay.copies.snapshot import (
    Snapshot,
    Trainable,
    scaler_stages,
    set_scaler_stages,
)
from nanstop.replay.step import Step, place_of_copies

_NOTE_BYTES = 1 << 15
"""What is noted of a micro-batch beside its batch: nearly all of it random state."""
_RETRY = 64
_MEMORY_SHARE = 0.25
_USUAL = 0.5
"""Over the root of its last dimension, the size of a weight of which nothing is finite any more."""
_NUM_BEGINNINGS = 8
"""Optimizers whose first update begins a way back at once: models that a script trains in turn."""
MOST_APART = 64
"""Updates in a row that train nothing of a snapshot, after which its model may be gone."""
_WEIGHED, _WEIGH_EVERY = 4, 8
"""Windows after a snapshot whose bytes are counted: the first, and of the others one in so many."""


@frozen
class Rewind:
    """A snapshot and the windows since then whose updates were applied, oldest first."""

    snapshot: Snapshot
    steps: tuple[Step, ...]

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Parameters, optimizer state and scaler are the snapshot's inside, the present ones
        after it: of an investigation, which may have room on a device.
        """
        put_back = _rates(self.snapshot.trainable.optimizers)
        with self.snapshot.loaded(place_of_copies):
            put_back()
            yield

    def restore(self) -> None:
        """Go back to the snapshot for good, in the midst of a window: what was unscaled in it stays
        so.
        """
        scaler = self.snapshot.trainable.scaler
        put_back, stages = _rates(self.snapshot.trainable.optimizers), scaler_stages(scaler)
        self.snapshot.restore()
        put_back()
        if scaler is not None:
            set_scaler_stages(scaler, stages)


@frozen
class PutRight:
    """A way back where none is kept, as of several optimizers that take turns: to the weights of
    now, ordinary numbers in the place of what is not finite.

    What divides by 0 where a gradient is 0 does so in the next update, too.
    """

    trainable: Trainable
    steps: tuple[Step, ...]

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Have the weights put right inside, and bitwise as they are after it."""
        with Snapshot(self.trainable).loaded(place_of_copies):
            for parameter in self.trainable.parameters.values():
                _put_right(parameter)
            yield


@dataclass(slots=True)
class SnapshotKeeper:
    """Keeps a way back: a snapshot, taken before update 0 and then again and again, and the windows
    since, by reference.

    One that lacks what the optimizer trains by now is taken anew. Beside the first, snapshots take
    ``time_share`` of the run's time at most, and no less where it can: one that costs as much as a
    step comes every 200 updates. Where the way back would end before the next one is due, because
    ``max_windows`` updates were made since or the batches and notes of the windows hold
    ``max_window_bytes``, the next may come earlier, as long as all of them take ``late_share``: a
    run whose snapshot costs up to five steps always has a way back of 512 updates. Where that is
    too little as well, there is none from the end of the windows until it is enough.

    ``by_count``: each way back has ``max_windows`` updates, whatever it costs, so that ranks that
    take the same steps have the same.

    ``reason``: why there is no way back, else "". A snapshot reads every trained value once (0.2 ns
    each on one core) and copies it with the optimizer's state to the host (0.5 to 1 ns, and 5 where
    memory is new); it is left out where that needs more than ``memory_share`` of the free memory.
    ``clock``: seconds.
    """

    free_bytes: Callable[[], int]
    time_share: float = 0.005
    late_share: float = 0.01
    memory_share: float = _MEMORY_SHARE
    least_updates: int = 16
    max_windows: int = 512
    max_window_bytes: int = 1 << 28
    clock: Callable[[], float] = time.perf_counter
    by_count: bool = False
    reason: str = ""
    snapshot: Snapshot | None = None
    _windows: list[Step] = field(default_factory=list)
    _window_bytes: int = 0
    _heaviest: int = 0
    """The most bytes that a window since the snapshot was seen to hold; what others are taken for:
    an unchanged loop's batch is found by a walk through all that was recorded.
    """
    _spent: float = 0.0
    _next_cost: float = 0.0
    _started: float = 0.0
    _num_updates: int = 0
    _num_since: int = 0
    _is_new: bool = False
    _optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet[Optimizer])
    _num_optimizers: int = 0
    _apart: weakref.WeakKeyDictionary[Optimizer, bool] = field(
        default_factory=weakref.WeakKeyDictionary[Optimizer, bool]
    )
    """Of those that have made an update since the snapshot: whether they train nothing of it."""
    _is_apart: bool = False
    _is_mixed: bool = False
    """Whether some has made an update since."""
    _num_apart: int = 0
    """Updates in a row."""

    def of(self, optimizer: Optimizer | None) -> None:
        """Say whose update comes next. The first one of an optimizer begins the way back anew: a
        snapshot of another one's state cannot take it back.
        """
        if optimizer is None:
            self._is_apart = False
            return
        apart = self._apart.get(optimizer)
        self._is_apart = self._met(optimizer) if apart is None else apart

    def _met(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer trains nothing of the snapshot. Its windows are not kept: so
        would be each model that a script trains and lets go of.
        """
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._num_optimizers += 1
            if self._num_updates and self._num_optimizers <= _NUM_BEGINNINGS:
                self.begin_anew()
        held = self.snapshot.trainable.parameters.values() if self.snapshot is not None else ()
        ids = set(map(id, held))
        trained = (id(one) for group in optimizer.param_groups for one in group["params"])
        self._apart[optimizer] = bool(ids) and ids.isdisjoint(trained)
        return self._apart[optimizer]

    def among(self, num_ranks: int) -> None:
        """Keep what ``num_ranks`` processes can go back to together, in memory that they share."""
        self.by_count = num_ranks > 1
        self.memory_share = _MEMORY_SHARE / num_ranks

    def before_update(
        self, trainable: Callable[[], Trainable], step: Step, *, may_take: bool = True
    ) -> None:
        """Note that the update of ``step`` is about to be applied;
        ``trainable`` is asked for only when it is time.

        Without ``may_take`` it has been by now: no snapshot can be taken.
        """
        if self._num_updates == 0:
            self._started = self.clock()
        if may_take and self.is_due():
            self._num_since, self._is_new = 0, False
            self._is_apart = self._is_mixed = False
            self._apart.clear()
            self._take(trainable)
        if self.snapshot is not None:
            self._num_apart = self._num_apart + 1 if self._is_apart else 0
            self._keep(step)
        self._num_updates += 1
        self._num_since += 1

    def begin_anew(self) -> None:
        """Have the next update begin the way back: more is to be copied by now."""
        self.forget()
        self._is_new = True

    def holds(self, optimizer: Optimizer | None) -> bool:
        """Return whether the snapshot has the state of an optimizer."""
        return self.snapshot is not None and optimizer in self.snapshot.trainable.optimizers

    def take_out(self, step: Step) -> None:
        """Note that the update of the last window, ``step``, is not applied after all."""
        if self._windows and self._windows[-1] is step:
            self._windows.pop()

    def rewind(self) -> Rewind | None:
        """Return the way back, or None: ``reason`` says why, or other weights than the snapshot's
        were updated since.
        """
        if self.snapshot is None or self._is_mixed:
            return None
        return Rewind(self.snapshot, tuple(self._windows))

    def forget(self) -> None:
        """Free the snapshot and the windows; the next update that is due takes a new one."""
        self.snapshot = None
        self._apart.clear()
        self._windows.clear()
        self._window_bytes = self._heaviest = 0

    def is_due(self) -> bool:
        """Return whether a snapshot is to be taken before the next update."""
        if self._is_new or self._num_updates == 0:
            return True
        if self.snapshot is not None and not self.snapshot.is_whole():
            self.forget()
            return True
        if self.by_count:
            least = self.max_windows if self.snapshot is not None else 0
            return self._num_since >= (_RETRY if self.reason else least)
        # An update may be ruined by what was rounded away in some before it:
        # the way back must begin before those.
        if self.snapshot is not None and self._num_since < self.least_updates:
            return False
        # What stood in the way may have gone; asking again is cheap, but not on every update.
        if self.reason and self._num_since < _RETRY:
            return False
        share = (
            self.time_share if self.snapshot is not None and self._has_room() else self.late_share
        )
        return self._spent + self._next_cost <= share * (self.clock() - self._started)

    def _has_room(self) -> bool:
        """Return whether another window like those so far can be kept."""
        num = len(self._windows)
        return num < self.max_windows and self._window_bytes * (num + 1) <= (
            self.max_window_bytes * max(1, num)
        )

    def _take(self, now: Callable[[], Trainable]) -> None:
        start = self.clock()
        trainable = now()
        # Optimizer state of Adam's kind is twice the parameters and appears with the first update.
        parameters = sum(p.numel() * p.element_size() for p in trainable.parameters.values())
        present = trainable.num_bytes()
        needed, free = max(present, 3 * parameters), self.free_bytes()
        if needed > self.memory_share * free:
            self.forget()
            self.reason = f"a snapshot needs {needed} bytes, {free} bytes of memory are free"
            return
        snapshot = None
        if not nonfinite(trainable.parameters):
            spent = self.snapshot
            self.forget()
            snapshot = Snapshot(trainable, spent=spent)
        cost = self.clock() - start
        if self._num_updates:
            self._spent += cost
        self._next_cost = cost * needed / max(present, 1)
        if snapshot is not None:
            self.snapshot, self.reason = snapshot, ""

    def _keep(self, step: Step) -> None:
        if self._num_apart:  # what it read of other models is no more
            self._is_mixed = True
            self._windows.clear()
        if self._num_apart >= MOST_APART:
            self.forget()
        if self._is_mixed:
            return
        self._windows.append(step)
        number = len(self._windows)
        if number <= _WEIGHED or number % _WEIGH_EVERY == 0:
            self._heaviest = max(self._heaviest, _num_bytes(step))
        self._window_bytes += self._heaviest
        if len(self._windows) > self.max_windows or self._window_bytes > self.max_window_bytes:
            self.reason = (
                f"{len(self._windows)} updates since the last snapshot ({self._window_bytes} bytes "
                "of batches and notes) are more than are kept"
            )
            self.forget()


def _rates(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return what gives optimizers the learning rates that they have now: windows bring their own,
    and what a schedule goes on from is the latest.
    """
    rates = [(g, g["lr"]) for one in optimizers for g in one.param_groups if "lr" in g]

    def put_back() -> None:
        for group, rate in rates:
            group["lr"] = rate

    return put_back


def _num_bytes(step: Step) -> int:
    """Return what the batches and notes of a window hold."""
    batches = step.batches
    held = [value for batch in batches for value in batch.values() if isinstance(value, Tensor)]
    return len(batches) * _NOTE_BYTES + bytes_of(*held)


@torch.no_grad()
def _put_right(parameter: Tensor) -> None:
    """Write to each element that is not finite a number of the size of the others, another each."""
    values = parameter.data
    if not is_measurable(values):
        return
    with by_torch_alone():
        bad = bad_mask(values)
        if not bool(bad.any()):
            return
        healthy = values[~bad].abs().float()
        wide = values.shape[-1] if values.dim() else 1
        size = healthy.median() if healthy.numel() else torch.tensor(_USUAL / math.sqrt(wide))
        places = torch.arange(values.numel(), device=values.device, dtype=torch.float32)
        spread = (2.0 * ((places * 0.618034) % 1.0) - 1.0).view(values.shape)
        size = size.to(values.device).clamp(min=1e-3)
        values.copy_(torch.where(bad, (size * spread).to(values.dtype), values))
