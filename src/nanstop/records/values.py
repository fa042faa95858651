"""What one step computes: where it stands, its operations, the range of its tensors."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import PurePath

from nanstop.records.record import record
from nanstop.records.vocabulary import (
    NOT_FINITE,
    Descent,
    FailureKind,
    Finiteness,
    Origin,
    Phase,
    SignalSource,
)

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

FORMAT_MAX: dict[str, float] = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
"""The largest finite number of each floating-point format."""

FlightOperand = tuple[str, tuple[int, ...]]
"""dtype and shape of a tensor that an operation reads, as the flight file has them."""


@record
class StepId:
    """Which step of which run: optimizer step and micro-batch in its window count from 0."""

    run: str
    step: int
    micro: int | None = None
    rank: int = 0


@record
class SourceLine:
    """A line of Python: of the user's script or of the library that defines the module."""

    file: str
    line: int
    function: str
    text: str = ""

    @property
    def short(self) -> str:
        """``train.py:31``."""
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def quoted(self) -> str:
        """The line with its text."""
        return f"{self.short}  {self.text}"


def entry_of(name: str) -> str:
    """Return what an entry of the batch is called in it; any other name as it is."""
    entry = name.removeprefix("batch[")
    return entry.removesuffix("]") if entry != name else name


def origin_of(name: str | None) -> Origin:
    """Return where a tensor comes from by the name that it had before the step, see
    ``TensorStats.name``: "from_param", "from_buffer", "from_batch", "from_state"; "unknown" without
    one.
    """
    if name is None:
        return "unknown"
    if name.startswith("batch["):
        return "from_batch"
    if name.startswith("buffer "):
        return "from_buffer"
    return "from_state" if name.startswith("state ") else "from_param"


@record
class TensorStats:
    """Range of one tensor. ``absmax``, ``absmin_nonzero`` and ``minimum`` are over the finite
    values.

    ``exponents``: (e, how many) of those with 2^e <= size < 2^(e+1), of about a million of them at
    most; empty where they were not counted.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    absmax: float = 0.0
    absmin_nonzero: float = 0.0
    minimum: float | None = None
    zeros: int = 0
    subnormal: int = 0
    first_bad: tuple[int, ...] | None = None
    name: str | None = None
    """The parameter that this tensor is, the ``buffer NAME``, the ``batch[NAME]`` or the
    ``state KEY of PARAMETER``, where it is one.
    """
    exponents: tuple[tuple[int, int], ...] = ()

    @property
    def finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return not (self.nan or self.posinf or self.neginf)

    @property
    def num_bad(self) -> int:
        """How many elements are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    @property
    def headroom_bits(self) -> float:
        """Doublings left before ``absmax`` leaves the format; 0 beyond it, inf for only zeros."""
        limit = FORMAT_MAX.get(self.dtype)
        if limit is None or self.absmax == 0.0:
            return math.inf
        if not self.finite:
            return 0.0
        return math.log2(limit / self.absmax)


@lru_cache(maxsize=4096)
def op_name(op: str) -> str:
    """Return an operation without namespace and overload: ``add_`` of ``aten.add_.Tensor``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


_OVER_LISTS = "_foreach_"
_DIVISIONS = ("div", "true_divide", "floor_divide", "remainder", "fmod", "addcdiv")


def op_kind(op: str) -> str:
    """Return ``op_name`` without the mark of a change in place: ``add`` of ``aten.add_.Tensor``."""
    name = op_name(op)
    return name if name.endswith("__") else name.removesuffix("_")


@record
class Unwritten:
    """Memory that an operation hands on as it was: ``count`` elements, None where that is not
    known, and ``rows`` of its result's first axis, from the first to the last, where they are
    whole ones.
    """

    count: int | None = None
    rows: tuple[int, int] | None = None


@record
class LineNumber:
    """A number that a line computes of its variables: ``text`` as the line spells it, and ``of``
    what they hold: (("self.label_smoothing", 0.5),).
    """

    text: str
    value: float
    of: tuple[tuple[str, float], ...] = ()


@record
class LineOp:
    """The first operation of a line that computes in half precision. ``phase``: when it does.
    ``casts``: whether the line casts to that, or an autocast there.
    """

    source: SourceLine
    op: str
    phase: Phase
    casts: bool = False


@record
class OpEvent:
    """One operation as torch dispatched it. ``op`` is printed as torch does: ``aten.mul.Tensor``.

    ``wider``: the same op on the same inputs in a format of more range (float16 -> float32, others
    -> float64). ``reference``: the same op in the same format by reference mathematics (another
    kernel, eager instead of compiled). ``forward_op``: for a backward op, the forward op whose
    gradient it computes; ``module`` and ``source`` are that op's; None for what a hook computes.
    ``forward_outputs``: the range of what that op returned, where it was recorded; its counts say
    only that there are such elements. ``module_class``: the class of that module, "" where that is
    not known. ``legal``: why a non-finite value is meant to be there (a mask), else None.
    ``descent``: of each input, what it is by the operations that made it; empty
    where that is not known. ``read_by``: the first operations that compute with the result.
    ``unwritten``: what of its result nobody has written, where that is all that is bad in it.
    ``zeros``: the numbers of the program's that are 0 and that its line divides by, where it
    divides by one, or adds to what it divides by, where that is 0.
    ``lines_in_half``: of what it is made of, the lines in its module, or outside of all, that
    compute in half precision, the latest first: its own, it may be.
    """

    index: int
    phase: Phase
    op: str
    module: str
    module_class: str = ""
    source: SourceLine | None = None
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    scalars: tuple[float, ...] = ()
    node: str | None = None
    forward_op: str | None = None
    forward_outputs: tuple[TensorStats, ...] = ()
    wider: Finiteness = "unknown"
    reference: Finiteness = "unknown"
    fully_masked_rows: int = 0
    legal: str | None = None
    descent: tuple[tuple[Descent, ...], ...] = ()
    read_by: tuple[str, ...] = ()
    unwritten: Unwritten | None = None
    zeros: tuple[LineNumber, ...] = ()
    lines_in_half: tuple[LineOp, ...] = ()

    @property
    def name(self) -> str:
        """Its kind: ``div``, see ``op_kind``."""
        return op_kind(self.op)

    @property
    def is_of_hook(self) -> bool:
        """Whether a hook on a gradient computes it: it runs in the backward pass, and belongs to
        no derivative.
        """
        return self.node is not None and self.forward_op is None

    @property
    def is_of_function(self) -> bool:
        """Whether the backward of an ``autograd.Function`` computes it: a formula that somebody
        wrote down, and that nothing derives from the forward.
        """
        return self.forward_op is not None and "." not in self.forward_op

    @property
    def divisor(self) -> int | None:
        """The place of the input that the operation divides by; None where it divides by none. Of
        one over lists of tensors, that which the first output that is not finite is divided by.
        """
        if self.name.removeprefix(_OVER_LISTS) in _DIVISIONS:
            return self._last_operand()
        negative = self.name == "pow" and bool(self.scalars) and self.scalars[-1] < 0
        return 0 if self.inputs and (negative or self.name in ("reciprocal", "rsqrt")) else None

    @property
    def divides_by_count(self) -> bool:
        """Whether what it divides by is a sum of whole numbers: 0, or 1 at least."""
        divisor = self.divisor
        if divisor is None or divisor >= len(self.descent):
            return False
        return {"count", "whole"} <= set(self.descent[divisor])

    @property
    def reads_whole(self) -> bool:
        """Whether it is one function of one tensor that holds whole numbers."""
        return len(self.inputs) == 1 and self.inputs[0].dtype.startswith(("int", "uint"))

    def _last_operand(self) -> int | None:
        num = len(self.outputs) if self.name.startswith(_OVER_LISTS) else 1
        bad = (place for place, made in enumerate(self.outputs[:num]) if not made.finite)
        is_tensor = num > 0 and len(self.inputs) >= 2 * num
        return len(self.inputs) - num + next(bad, 0) if is_tensor else None


@record
class FailureKey:
    """What makes two failures the same one: compared without layer numbers and overloads."""

    kind: FailureKind
    phase: Phase
    op: str = ""
    module: str = ""

    @property
    def folded(self) -> tuple[str, str, str, str]:
        """(kind class, phase, op family, module without layer numbers); nan and inf are one."""
        kind = "nonfinite" if self.kind in NOT_FINITE else self.kind
        family = ".".join(self.op.split(".")[:2])
        return kind, self.phase, family, _LAYER_NUMBER.sub("*", self.module)

    def same_as(self, other: FailureKey) -> bool:
        """Return whether both are one failure: equal ``folded`` keys."""
        return self.folded == other.folded


@record
class GradientTally:
    """Gradients of a window as the sentinel met them, in tensors.

    ``num_bad``: not finite, ``num_inf`` of them with an Inf; ``num_zero``: zero throughout.
    """

    num_total: int
    num_bad: int
    num_inf: int = 0
    num_zero: int = 0


@record
class Signal:
    """What the sentinel, an exception or the gauge reported. ``name``: of what it is about."""

    source: SignalSource
    value: float | None = None
    threshold: float | None = None
    at: StepId | None = None
    name: str = ""
    message: str = ""
    gradients: GradientTally | None = None
    raised_at: SourceLine | None = None
    """The innermost line of the script that an exception went through."""


@record
class Series:
    """A named history: ``loss_raw`` (one value a micro-batch), ``loss_logged``, ``grad_norm``,
    ``scale``, ``lr``.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
