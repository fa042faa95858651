"""The flight file: what a training process was doing, kept where its death cannot reach it.

One small memory-mapped file a process. What is written into the map survives SIGKILL, because the
pages belong to the kernel. Every record carries its sequence number and a checksum over both, so
that one that was cut off half-way is told from a whole one. Steps are always noted (one record a
step); operations only while a recorder is switched on.

Layout: a header, ``NUM_STEPS`` step records, one record of how the process ended, ``num_ops``
operation records.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanstop.errors import NanstopError
from nanstop.frozen import frozen

if TYPE_CHECKING:
    from nanstop.records.values import FlightOperand

MAGIC = b"NSFLIGHT"
VERSION = 3
NUM_OPS = 256
NUM_STEPS = 64
MAX_OPS = 2**16
PHASES = ("forward", "recompute", "backward", "optimizer", "generate", "loss", "evaluate")
"""Those of ``records.vocabulary``, which each watched process would have to import at its start."""

_HEADER = struct.Struct("<8sIIII")  # magic, version, pid, number of operation records, checksum
_SEAL = struct.Struct("<IQH")  # checksum of the rest, sequence number from 1, length of the body
_STEP = struct.Struct("<qd")
_OP = struct.Struct("<qB")
_RESTING = -1
_STEP_BYTES = 32
_END_BYTES = 1024
_OP_BYTES = 1024  # its last byte says whether the operation returned
_STEPS_AT = 64
_END_AT = _STEPS_AT + NUM_STEPS * _STEP_BYTES
_OPS_AT = 4096
_MAX_SOURCE = 500
_FIELD, _OPERAND = "\x1f", "\x1e"


@frozen(kw_only=True)
class OpRecord:
    """One operation, written before it ran.

    ``done``: it returned. ``source``: "file:line function", or "".
    """

    number: int
    step: int
    phase: str
    op: str
    module: str
    source: str
    operands: tuple[FlightOperand, ...]
    done: bool


@frozen(kw_only=True)
class Exchange:
    """What a process was in that other processes have to come to as well.

    ``within``: "forward", "backward" or, of a script's own, "collective". ``at``: "file:line in
    function" of the script's innermost frame.
    """

    within: str
    at: str


@frozen(kw_only=True)
class Flight:
    """What is left of a process.

    ``steps``: (optimizer step from 0, when it was completed on this machine's monotonic clock),
    oldest first, the last ``NUM_STEPS`` of them. ``resting``: no training was under way. ``ended``:
    type and message of the exception that ended it, two empty strings for an orderly end, None if
    it never came to that. ``exchange``: where it was raised, if what raised it waits for other
    processes. ``torn``: records that were cut off half-way.
    """

    pid: int
    steps: tuple[tuple[int, float], ...]
    ended: tuple[str, str] | None
    exchange: Exchange | None
    ops: tuple[OpRecord, ...]
    torn: int
    resting: bool = False

    @property
    def num_updates(self) -> int:
        """How many optimizer steps were completed."""
        return self.steps[-1][0] + 1 if self.steps else 0

    @property
    def step(self) -> int:
        """The optimizer step that was being computed: the one after the last completed."""
        return max(self.num_updates, self.ops[-1].step) if self.ops else self.num_updates


class FlightFile:
    """Writes the flight file of this process. A forked child that inherits it writes nothing.

    Errors: ``OSError`` where the file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], *, num_ops: int = 0) -> None:
        self.path = Path(path)
        self._pid = os.getpid()
        self._num_ops = num_ops
        self._num_steps_seen = self._num_ops_seen = 0
        self._step = 0
        head = _HEADER.pack(MAGIC, VERSION, self._pid, num_ops, 0)[:-4]
        blank = bytes(_OPS_AT + num_ops * _OP_BYTES - _HEADER.size)
        fresh = self.path.with_suffix(".new")
        fresh.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + blank)
        fresh.replace(self.path)  # nobody ever meets a file without its header
        with self.path.open("r+b") as stream:  # Windows does not rename a file that is mapped
            self._map = mmap.mmap(stream.fileno(), 0)

    def step(self, step: int) -> None:
        """Note that optimizer step ``step`` is complete."""
        self._step = step + 1
        self._note(step)

    def rest(self) -> None:
        """Note that a training is over: until the next step begins, none is missed by who waits."""
        self._note(_RESTING)

    def _note(self, step: int) -> None:
        if os.getpid() != self._pid:
            return
        self._num_steps_seen += 1
        at = _STEPS_AT + self._num_steps_seen % NUM_STEPS * _STEP_BYTES
        self._write(at, self._num_steps_seen, _STEP.pack(step, time.monotonic()))

    def op(
        self, phase: str, op: str, module: str, source: str, operands: Sequence[FlightOperand]
    ) -> int:
        """Note an operation that is about to run.

        Return the place to give to ``done``, 0 if there is none.
        """
        if not self._num_ops or os.getpid() != self._pid:
            return 0
        self._num_ops_seen += 1
        at = _OPS_AT + self._num_ops_seen % self._num_ops * _OP_BYTES
        shown = _OPERAND.join(f"{dtype}:{','.join(map(str, shape))}" for dtype, shape in operands)
        if len(_bytes(source)) > _MAX_SOURCE:  # half a path would be that of another file
            source = source.rpartition(os.sep)[2][-_MAX_SOURCE:]
        text = _bytes(_FIELD.join((op, module[-160:], source, shown)))
        limit = _OP_BYTES - _SEAL.size - _OP.size - 1
        body = _OP.pack(self._step, PHASES.index(phase)) + text[:limit]
        self._map[at + _OP_BYTES - 1] = 0
        self._write(at, self._num_ops_seen, body)
        return at

    def done(self, place: int) -> None:
        """Note that the operation of ``place`` returned."""
        if place:
            self._map[place + _OP_BYTES - 1] = 1

    def ended(self, kind: str = "", message: str = "", exchange: Exchange | None = None) -> None:
        """Note how this process ends.

        Type and message of an exception, or nothing for an orderly end.
        """
        if os.getpid() == self._pid:
            within, at = (exchange.within, exchange.at) if exchange is not None else ("", "")
            text = _bytes(_FIELD.join((kind, within, at, message)))
            self._write(_END_AT, 1, text[: _END_BYTES - _SEAL.size])

    def _write(self, at: int, number: int, body: bytes) -> None:
        rest = struct.pack("<QH", number, len(body)) + body
        record = struct.pack("<I", zlib.crc32(rest)) + rest
        self._map[at : at + len(record)] = record


def _bytes(text: str) -> bytes:
    """Return text as UTF-8, with ``?`` for what has none: part of a file's name may."""
    return text.encode(errors="replace")


def read(path: str | os.PathLike[str]) -> Flight:
    """Return what a flight file holds whole; anything torn is left out and counted.

    Errors: ``NanstopError`` NS001 for a file that is missing or none of ours.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise NanstopError(f"cannot read {file}: {error.strerror or error}") from error
    pid, num_ops = _header(file, data)
    steps, torn_steps = _records(data, _STEPS_AT, NUM_STEPS, _STEP_BYTES)
    ends, torn_end = _records(data, _END_AT, 1, _END_BYTES)
    ops, torn_ops = _records(data, _OPS_AT, num_ops, _OP_BYTES)
    ended = exchange = None
    if ends:
        text = ends[0][1].decode(errors="replace")
        kind, within, at, message = (*text.split(_FIELD, 3), "", "", "")[:4]
        ended, exchange = (kind, message), Exchange(within=within, at=at) if within else None
    noted = [_STEP.unpack(body[: _STEP.size]) for _, body, _ in steps]
    return Flight(
        pid=pid,
        steps=tuple((step, at) for step, at in noted if step >= 0),
        resting=bool(noted) and noted[-1][0] < 0,
        ended=ended,
        exchange=exchange,
        ops=tuple(_op(*record) for record in ops),
        torn=torn_steps + torn_end + torn_ops,
    )


def _header(file: Path, data: bytes) -> tuple[int, int]:
    """Return (pid, number of operation records).

    Errors: ``NanstopError`` NS001 for a file of another kind.
    """
    wrong = NanstopError(f"{file}: not a flight file of this version")
    if len(data) < _OPS_AT:
        raise wrong
    magic, version, pid, num_ops, checksum = _HEADER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION) or checksum != zlib.crc32(data[: _HEADER.size - 4]):
        raise wrong
    if num_ops > MAX_OPS or len(data) != _OPS_AT + num_ops * _OP_BYTES:
        raise wrong
    return pid, num_ops


def _records(
    data: bytes, start: int, count: int, size: int
) -> tuple[list[tuple[int, bytes, bool]], int]:
    """Return the whole records of an area, oldest first, as (number, body, last byte set), and
    how many are torn.
    """
    whole, torn = [], 0
    for place in range(count):
        slot = data[start + place * size : start + (place + 1) * size]
        checksum, number, length = _SEAL.unpack_from(slot)
        end = _SEAL.size + length
        if end <= size and number and checksum == zlib.crc32(slot[4:end]):
            whole.append((number, slot[_SEAL.size : end], bool(slot[-1])))
        elif any(slot):
            torn += 1
    return sorted(whole), torn


def _op(number: int, body: bytes, done: bool) -> OpRecord:
    step, phase = _OP.unpack_from(body)
    fields = body[_OP.size :].decode(errors="replace").split(_FIELD)
    op, module, source, operands = (*fields, "", "", "", "")[:4]
    return OpRecord(
        number=number,
        step=step,
        phase=PHASES[phase] if phase < len(PHASES) else PHASES[0],
        op=op,
        module=module,
        source=source,
        operands=tuple(_operands(operands)),
        done=done,
    )


def _operands(text: str) -> Iterator[FlightOperand]:
    """Yield the operands; one that the record's end has cut is left out."""
    for part in text.split(_OPERAND):
        dtype, colon, shape = part.partition(":")
        sizes = shape.split(",") if shape else []
        if colon and all(size.isdigit() for size in sizes):
            yield dtype, tuple(map(int, sizes))
