"""One micro-batch run on the device of each rank: which of them computes otherwise than the rest.

A device that computes wrongly now and then gives no NaN and no error. Fleets find it by running the
same step again elsewhere (https://arxiv.org/abs/2407.21783, 3.3.4). Operations are compared that
read the same bits on all ranks, so that nothing else explains another result; and as kernels may be
chosen by each device for itself, which of two results is wrong is asked of float64.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanstop.decide.agreement import Ranks
from nanstop.errors import NanstopError
from nanstop.numerics.accelerator import device_name
from nanstop.numerics.tensors import bytes_of
from nanstop.records import DeviceFacts
from nanstop.replay.step import Batch, Step
from nanstop.tracing.op_digests import Digest, FarFromFloat64, OpDigests
from nanstop.tracing.record_step import look_again, record
from nanstop.tracing.recorder import Op

_PIECE = 4 << 20
"""Characters that one answer of a rank has at most: a store takes 8 MiB."""
_MOST_BYTES = 64 << 20
"""Of a micro-batch that is sent to all ranks."""
_FAR, _ROUNDED = 16.0, 64.0
"""An odd result is so many times as far from float64 as the nearest one, and so many spacings at
least: long sums are not exact either.
"""
_MOST_JUDGED = 8


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one operation: what it read and wrote, and whether a second run gave the same."""

    digest: Digest
    is_steady: bool


_Table = Mapping[int, _Seen]
"""Operations by their number in the run."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A micro-batch that every rank runs."""

    step: Step
    micro: int
    batch: Batch
    ranks: Ranks

    def table(self) -> tuple[tuple[Op, ...], _Table]:
        """Return this rank's operations and what they are, by two runs. Raises what those raise."""
        first, second = OpDigests(), OpDigests()
        recording = record(self.step, self.micro, look=first, batch=self.batch)
        ops = recording.whole_trace().ops
        look_again(self.step, self.micro, second, batch=self.batch)
        again = second.read()
        return ops, {
            index: _Seen(digest, again[index] == digest)
            for index, digest in first.read().items()
            if digest.wrote and index in again and again[index].read == digest.read
        }

    def errors(self, index: int) -> tuple[float | None, ...]:
        """Return how far each rank's results of an operation are from float64, by a third run."""
        far = FarFromFloat64(index)
        look_again(self.step, self.micro, far, batch=self.batch)
        told = self.ranks.gather("device error", json.dumps(far.error))
        return tuple(json.loads(one) for one in told)


def audit_devices(step: Step, micro: int, ranks: Ranks, source: int) -> DeviceFacts:
    """Return what the devices of all ``ranks`` make of micro-batch ``micro`` of rank ``source``.
    Every rank calls it in the same step, the weights being the same. Undone; synchronises.

    Two runs of a micro-batch in which all tensors are read about twice, and one more for each
    operation that is judged. Errors: ``NanstopError`` where a rank does not come or cannot run it,
    or its tensors are too large.
    """
    if ranks.size == 1:
        raise NanstopError("no other rank trains this model, or they cannot agree")
    run = _Run(step, micro, _batch_of(source, ranks, step, micro), ranks)
    devices = ranks.gather("device", device_name())
    with step.collectives.together(ranks):
        try:
            (ops, own), obstacle = run.table(), ""
        except Exception as error:  # whatever it is, the others must not wait for this rank
            (ops, own), obstacle = ((), {}), f"{type(error).__name__}: {error}"
        _require_none(ranks.gather("device run", obstacle, patient=True))
        tables = [_as_table(text) for text in _gathered(ranks, "device ops", _as_text(own))]
        alike = [index for index in own if _read_the_same(tables, index)]
        facts = DeviceFacts(devices=devices, step=step.id.step, num_compared=len(alike))
        odd = [index for index in alike if len({table[index] for table in tables}) > 1]
        for index in odd[:_MOST_JUDGED]:
            errors, op = run.errors(index), ops[index]
            wrong = _wrong(errors)
            unsteady = () if wrong else _unsteady([table[index] for table in tables])
            if wrong or unsteady:
                return replace(
                    facts,
                    op=op.name,
                    module=op.module,
                    phase=op.phase,
                    ranks=wrong or unsteady,
                    errors=errors,
                    unsteady=not wrong,
                )
    return facts


def _wrong(errors: Sequence[float | None]) -> tuple[int, ...]:
    """Return the ranks whose results are far from float64 where most are near, () for none."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return ()
    bound = max(_ROUNDED, _FAR * min(known))
    wrong = tuple(rank for rank, error in enumerate(known) if error > bound)
    return wrong if 2 * len(wrong) <= len(known) else ()


def _unsteady(seen: Sequence[_Seen]) -> tuple[int, ...]:
    """Return the one rank that gave two results where all others gave one, the same."""
    unsteady = tuple(rank for rank, one in enumerate(seen) if not one.is_steady)
    steady = {one.digest for one in seen if one.is_steady}
    return unsteady if len(unsteady) == len(steady) == 1 else ()


def _batch_of(source: int, ranks: Ranks, step: Step, micro: int) -> Batch:
    """Return rank ``source``'s micro-batch, with this rank's own entries that are no tensors."""
    own = step.batches[micro]
    text = problem = ""
    if ranks.rank == source:
        tensors = {name: one.detach().cpu() for name, one in own.items() if isinstance(one, Tensor)}
        if bytes_of(*tensors.values()) > _MOST_BYTES:
            problem = f"a micro-batch has more than {_MOST_BYTES >> 20} MiB"
        else:
            held = io.BytesIO()
            torch.save(tensors, held)
            text = base64.b64encode(held.getvalue()).decode()
    _require_none(ranks.gather("device batch", problem))
    sent = io.BytesIO(base64.b64decode(_gathered(ranks, "device values", text)[source]))
    given: Mapping[str, Tensor] = torch.load(sent, weights_only=True)
    others = given.keys() - own.keys()
    _require_none(ranks.gather("device entries", f"it has no {sorted(others)}" if others else ""))
    return {**own, **{name: one.to(own[name].device) for name, one in given.items()}}


def _gathered(ranks: Ranks, question: str, text: str) -> list[str]:
    """Return a text of each rank, of any length."""
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    number = max(map(int, ranks.gather(question, str(len(pieces)))))
    whole = [""] * ranks.size
    for place in range(number):
        said = ranks.gather(f"{question} {place}", "".join(pieces[place : place + 1]))
        whole = [known + more for known, more in zip(whole, said, strict=True)]
    return whole


def _require_none(problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise NanstopError(f"rank {rank}: {problem}")


def _read_the_same(tables: Sequence[_Table], index: int) -> bool:
    """Return whether an operation has read the same on all ranks."""
    read = {table[index].digest.read if index in table else None for table in tables}
    return len(read) == 1 and None not in read


def _as_text(table: _Table) -> str:
    return json.dumps([[index, *one.digest, one.is_steady] for index, one in table.items()])


def _as_table(text: str) -> _Table:
    rows: list[list[Any]] = json.loads(text)
    return {index: _Seen(Digest(read, wrote), steady) for index, read, wrote, steady in rows}
