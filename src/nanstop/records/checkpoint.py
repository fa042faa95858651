"""What a checkpoint holds: the range of every tensor, the formats that it fits, and what its config expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from nanstop.records.facts import TokenRows
from nanstop.records.values import TensorStats
from nanstop.records.vocabulary import CONFIG

KeyTrouble = Literal["missing", "unexpected", "shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFit:
    """What a plain cast of one tensor to ``format`` would do to its finite values.

    ``overflow`` round beyond its largest number, ``zero`` vanish, ``subnormal`` keep fewer bits than the format's others.
    ``headroom_bits``: doublings left below the format's largest number; negative where values exceed it. ``exact``:
    False where ``zero`` and ``subnormal`` were counted on a part of the tensor and scaled up.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    format: str
    headroom_bits: float
    overflow: int = 0
    subnormal: int = 0
    zero: int = 0
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScan:
    """One stored tensor. ``measured`` is False where only shape and format are known, with the reason in ``note``.

    ``exact``: False where ``stats.subnormal`` was counted on a part of the tensor and scaled up.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    name: str
    file: str
    stats: TensorStats
    fits: tuple[FormatFit, ...] = ()
    exact: bool = True
    measured: bool = True
    note: str = ""

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.stats.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyProblem:
    """A tensor that the config or the index expects and the files lack, or the other way round.

    ``new_on_load``: loading the checkpoint would draw this tensor anew, or leave it as the memory was.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    kind: KeyTrouble
    name: str
    detail: str
    new_on_load: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScan:
    """A whole checkpoint: a model's or an adapter's. Names from its config are None where it does not say."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
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
