"""What is run to find where a failure began, and how its batch lies in rows and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nanstop.errors import ShortOfMemoryError
from nanstop.localize.positions import BatchLayout, Grid
from nanstop.numerics.room import give_back
from nanstop.numerics.tensors import is_plain
from nanstop.records import Phase
from nanstop.records.values import origin_of
from nanstop.replay.step import Step
from nanstop.tracing.op_patches import Look, Patch
from nanstop.tracing.record_step import (
    Recording,
    given_in_objects,
    known_tensors,
    look_again,
    record,
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is run: a micro-batch of a step, or with ``update`` the update of its window;
    ``phase``: what it is called.
    """

    step: Step
    micro: int
    update: bool
    phase: Phase

    def recorded(self, patch: Patch | None = None) -> Recording:
        run = partial(
            record, self.step, self.micro, update=self.update, phase=self.phase, look=patch
        )
        try:
            return run()
        except ShortOfMemoryError:  # of what runs before it have left in pieces, it may be
            give_back(self.step.view.device_type)
            return run()

    def seen_again(
        self, *looks: Look, until: int | None = None
    ) -> tuple[tuple[str, ...], Exception | None]:
        return look_again(self.step, self.micro, *looks, update=self.update, until=until)

    @property
    def layout(self) -> BatchLayout:
        """How the batch of the micro-batch lies."""
        taken = getattr(self.step, "data_of", lambda _: ())(self.micro)
        data = frozenset(f"batch[{name}]" for name in taken)
        return BatchLayout(grid=self.grid, rows=self._rows, masks=self._masks, data=data)

    @property
    def grid(self) -> Grid | None:
        """The rows and the length of the token ids, None where there are none."""
        ids = self.step.view.token_ids(self.step.batches[self.micro])
        if ids is None or ids.dim() != 2 or ids.is_nested:
            return None
        return Grid((int(ids.shape[0]), int(ids.shape[1])), self.step.view.root)

    @property
    def _masks(self) -> frozenset[str]:
        """The names of what in the batch holds nothing but 0 and 1; all 0 may be anything."""
        named = known_tensors(self.step, self.micro)
        return frozenset(
            name
            for name, tensor in named.items()
            if origin_of(name) == "from_batch" and is_plain(tensor) and _is_mask(tensor)
        )

    @property
    def _rows(self) -> int | None:
        if given_in_objects(self.step, self.micro):  # a graph has a row for each of its nodes
            return None
        entries = self.step.batches[self.micro].values()
        first = next((v for v in entries if isinstance(v, Tensor) and v.dim()), None)
        return int(first.shape[0]) if first is not None and not first.is_nested else None


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is 0 or 1 everywhere; of floats, 1 at least once."""
    ones = tensor == 1
    return bool((ones | (tensor == 0)).all()) and (
        not tensor.is_floating_point() or bool(ones.any())
    )
