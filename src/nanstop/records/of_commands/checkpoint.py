"""What a checkpoint holds: ranges, the formats that they fit, what its config expects."""

from __future__ import annotations

import math
from typing import Literal

from nanstop.records.facts import TokenRows
from nanstop.records.record import record
from nanstop.records.values import TensorStats

KeyTrouble = Literal["missing", "unexpected", "shape"]


@record
class FormatFit:
    """What a plain cast of one tensor to ``format`` would do to its finite values.

    ``overflow`` round beyond its largest number, ``zero`` vanish, ``subnormal`` keep fewer bits
    than the format's others. ``headroom_bits``: doublings left below the format's largest number;
    negative where values exceed it. ``exact``: False where ``zero`` and ``subnormal`` were counted
    on a part of the tensor and scaled up.
    """

    format: str
    headroom_bits: float
    overflow: int = 0
    subnormal: int = 0
    zero: int = 0
    exact: bool = True


@record
class TensorScan:
    """One stored tensor. ``measured`` is False where only shape and format are known, with the
    reason in ``note``.

    ``exact``: False where ``stats.subnormal`` was counted on a part of the tensor and scaled up.
    """

    name: str
    file: str
    stats: TensorStats
    fits: tuple[FormatFit, ...] = ()
    exact: bool = True
    measured: bool = True
    note: str = ""

    @property
    def num_elements(self) -> int:
        """The product of the shape: 1 for a scalar."""
        return math.prod(self.stats.shape)


@record
class KeyProblem:
    """A tensor that the config or the index expects and the files lack, or the other way round.

    ``new_on_load``: loading the checkpoint would draw this tensor anew, or leave it as the memory
    was.
    """

    kind: KeyTrouble
    name: str
    detail: str
    new_on_load: bool = False


@record
class CheckpointScan:
    """A whole checkpoint, a model's or an adapter's; None where its config does not say."""

    path: str
    kind: Literal["model", "adapter"]
    files: tuple[str, ...]
    num_bytes: int
    tensors: tuple[TensorScan, ...]
    token_rows: tuple[TokenRows, ...] = ()
    duplicates: tuple[tuple[str, ...], ...] = ()
    """Groups of tensors that hold the same bytes; tensors of one repeated value are left out."""
    keys: tuple[KeyProblem, ...] = ()
    architecture: str | None = None
    model_type: str | None = None
    declared_dtype: str | None = None
    quantization: str | None = None
    tied: bool | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
