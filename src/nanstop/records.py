"""Every immutable record of nanstop: what was seen, what was tried, what was done.

Records are facts. They hold no tensors, only numbers, strings and other records, so that rules, reports and the
command line work without torch and an old incident can be diagnosed anew. ``report.codec`` turns them into JSON and
back (non-finite floats are kept as strings) and publishes their schema.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

SCHEMA = 1

Phase = Literal["forward", "recompute", "backward", "optimizer", "generate", "loss", "evaluate"]
FailureKind = Literal[
    "nan", "+inf", "-inf", "zero_grad", "exception", "signal", "oom", "timeout", "absorbed"
]
SignalSource = Literal[
    "loss", "grad", "logits", "param", "state", "reward", "exception", "exit", "gauge", "scaler"
]
Origin = Literal[
    "born_here", "from_param", "from_batch", "from_buffer", "from_state", "absorbed", "unknown"
]
Fidelity = Literal["bitwise", "same_failure", "different", "not_reproduced"]
Finiteness = Literal["finite", "nonfinite", "unknown"]
Confidence = Literal["certain", "likely", "possible"]
Outcome = Literal["pass", "same_failure", "other_failure", "crash", "oom", "timeout"]
Verdict = Literal["proven", "plausible", "none_found"]
Safety = Literal["safe", "changes_training"]
ActionKind = Literal[
    "continue", "redo", "adopt", "skip", "rollback", "quarantine", "stop", "observe"
]

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

CONFIG: dict[str, Any] = {"ser_json_inf_nan": "strings", "extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepId:
    """Which step of which run: optimizer step and micro-batch in its window count from 0."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    run: str
    step: int
    micro: int | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of Python: of the user's script or of the library that defines the module."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    file: str
    line: int
    function: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Range of one tensor. ``absmax`` and ``absmin_nonzero`` are over the finite values."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    absmax: float = 0.0
    absmin_nonzero: float = 0.0
    zeros: int = 0
    subnormal: int = 0
    first_bad: tuple[int, ...] | None = None
    name: str | None = None
    """The parameter, buffer or batch entry that this tensor is, where it is one."""

    @property
    def finite(self) -> bool:
        return not (self.nan or self.posinf or self.neginf)

    @property
    def num_bad(self) -> int:
        return self.nan + self.posinf + self.neginf

    @property
    def headroom_bits(self) -> float:
        """Doublings left before ``absmax`` leaves the format; 0 when it already has, inf when all is zero."""
        limit = FORMAT_MAX.get(self.dtype)
        if limit is None or self.absmax == 0.0:
            return math.inf
        if not self.finite:
            return 0.0
        return math.log2(limit / self.absmax)


FORMAT_MAX: dict[str, float] = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEvent:
    """One operation as torch dispatched it. ``op`` is printed as torch does: ``aten.mul.Tensor``.

    ``wider``: the same op on the same inputs in a format of more range (float16 -> float32, others -> float64).
    ``reference``: the same op in the same format by reference mathematics (another kernel, eager instead of compiled).
    ``forward_op``: for a backward op, the forward op whose gradient it computes; ``module`` and ``source`` are that
    op's. ``legal``: why a non-finite value is meant to be there (a mask), else None.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    index: int
    phase: Phase
    op: str
    module: str
    source: SourceLine | None = None
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    scalars: tuple[float, ...] = ()
    node: str | None = None
    forward_op: str | None = None
    wider: Finiteness = "unknown"
    reference: Finiteness = "unknown"
    fully_masked_rows: int = 0
    legal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKey:
    """What makes two failures the same one: compared without layer numbers and overloads."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    kind: FailureKind
    phase: Phase
    op: str = ""
    module: str = ""

    @property
    def folded(self) -> tuple[str, str, str, str]:
        """(kind class, phase, op family, module without layer numbers); nan and inf fold together."""
        kind = "nonfinite" if self.kind in ("nan", "+inf", "-inf") else self.kind
        family = ".".join(self.op.split(".")[:2])
        return kind, self.phase, family, _LAYER_NUMBER.sub("*", self.module)

    def same_as(self, other: FailureKey) -> bool:
        return self.folded == other.folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What the sentinel, an exception or the gauge reported. ``name`` is the parameter, tensor or exception type."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    source: SignalSource
    value: float | None = None
    threshold: float | None = None
    at: StepId | None = None
    name: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A named history: ``loss_raw`` (one value a micro-batch), ``loss_logged``, ``grad_norm``, ``scale``, ``lr``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """Of one parameter: how many elements an update should have moved and did not."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    parameter: str
    dtype: str
    num_lost: int
    num_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters of one storage format and one trainability, with a few of their names."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    dtype: str
    trainable: bool
    num_tensors: int
    num_elements: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    name: str
    lr: float | None = None
    eps: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    state_bits: int | None = None
    """8 for an 8-bit optimizer, else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Rows of an embedding or head that look as if never trained: all zero, or far off the others' norm."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    parameter: str
    num_rows: int
    zero_rows: tuple[int, ...] = ()
    outlier_rows: tuple[int, ...] = ()
    median_norm: float = 0.0
    tied: bool = False
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFact:
    """One entry of a micro-batch: range, and for labels how many rows supervise nothing (all -100)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    micro: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    minimum: float | None = None
    maximum: float | None = None
    num_bad: int = 0
    num_rows_without_labels: int | None = None
    num_rows: int | None = None
    num_supervised: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    nanstop: str
    python: str
    torch: str | None = None
    cuda: str | None = None
    cublas: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    gpu: str | None = None
    capability: str | None = None
    packages: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    env_vars: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Standing facts of a run, read once when watching starts. ``veto``: "yes", or why an update cannot be stopped."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    host: str = ""
    """Trainer class, or "loop"."""
    param_groups: tuple[ParamGroup, ...] = ()
    autocast: str | None = None
    scaler: float | None = None
    attention: str | None = None
    quantization: str | None = None
    peft: str | None = None
    task: str | None = None
    loss: str | None = None
    optimizer: OptimizerFacts | None = None
    clip: float | None = None
    num_micro: int = 1
    batch_shape: tuple[int, ...] | None = None
    vocab: int | None = None
    table_rows: int | None = None
    token_rows: tuple[TokenRows, ...] = ()
    model_type: str | None = None
    declared_dtype: str | None = None
    """The format that the model's own config says it was trained in."""
    padding_side: str | None = None
    gradient_checkpointing: bool = False
    compiled: bool = False
    nan_inf_filter: bool = False
    logging_steps: int = 0
    zero_loss_by_design: str | None = None
    """Why a logged loss of exactly 0 is no failure here (on-policy GRPO), else None."""
    world_size: int = 1
    device: str = "cpu"
    veto: str = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """Range of one op's output under the gauge. ``growth``: doublings a step, where a fit was good enough."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    module: str
    op: str
    dtype: str
    absmax: float
    headroom_bits: float
    growth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRef:
    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    name: str
    sha256: str
    bytes: int
    holds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure as it was met, before anything was tried."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    schema: int = SCHEMA
    id: str
    at: StepId
    phase: Phase
    signals: tuple[Signal, ...]
    facts: RunFacts
    environment: Environment
    batch: tuple[BatchFact, ...] = ()
    bad_params: tuple[str, ...] = ()
    """Parameters that were not finite before this step's forward."""
    bad_state: tuple[str, ...] = ()
    snapshot: SnapshotRef | None = None
    history: tuple[Series, ...] = ()
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The failing micro-batch run again without instruments. ``eager``: finiteness with compilation off."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    incident: str
    fidelity: Fidelity
    runs: int
    key: FailureKey | None = None
    loss: float | None = None
    digest: str = ""
    eager: Finiteness = "unknown"
    private_rng: bool = False
    """A generator of the run's own was seen: a different replay is then no evidence of a race."""
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A sample (row of the batch) and its first and last bad token; None where the op has no such axis."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    sample: int
    first_token: int | None = None
    last_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Localization:
    """Where the failure was born. ``culprit``: parameter, batch entry or state when it was bad before any op ran."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    key: FailureKey
    first_bad: OpEvent | None
    origin: Origin
    culprit: str | None = None
    reaches: tuple[str, ...] = ()
    """What the bad value reached: "loss", or names of parameters whose gradient (or value) it spoiled."""
    growth: tuple[OpEvent, ...] = ()
    positions: tuple[Position, ...] | None = None
    """None: unknown (the op's axes are not those of the batch)."""
    absorbed: tuple[OpEvent, ...] = ()
    """Overflows that turned back into finite numbers downstream."""
    num_ops: int = 0
    blind_spots: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """The smallest switch: a remedy of ``remedies.TABLE``, what it acts on and with what value."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    remedy: str
    target: str = ""
    value: str = ""

    def __str__(self) -> str:
        inside = ", ".join(part for part in (self.target, self.value) if part)
        return f"{self.remedy}({inside})" if inside else self.remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All a rule may look at; every field is optional."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    facts: RunFacts | None = None
    environment: Environment | None = None
    incident: Incident | None = None
    replay: Replay | None = None
    localization: Localization | None = None
    ranges: tuple[RangeRow, ...] = ()
    series: tuple[Series, ...] = ()
    updates: tuple[UpdateRow, ...] = ()
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a rule concluded. ``remedies``: candidate sets of atoms, in the order in which they should be tried."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    code: str
    title: str
    cause: str
    confidence: Confidence
    lines: tuple[str, ...] = ()
    remedies: tuple[tuple[Atom, ...], ...] = ()
    page: str = ""
    where: str = ""
    accompanied_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the failing micro-batch under some atoms. Gaps are distances to the float32 reference."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    atoms: tuple[Atom, ...]
    outcome: Outcome
    micro: int = 0
    key: FailureKey | None = None
    loss: float | None = None
    loss_gap: float | None = None
    grad_cosine: float | None = None
    causal: bool | None = None
    rows_unchanged: bool | None = None
    """Whether every healthy row kept its loss and gradient; asked for where float32 fails as well."""
    seconds: float = 0.0
    peak_bytes: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The float32 run of the same micro-batch and the tolerances that a cure must keep."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    outcome: Outcome
    loss: float | None = None
    loss_tolerance: float = 0.0
    cosine_tolerance: float = 0.0
    source: str = ""
    """Where the tolerances come from: a healthy micro-batch of the same run, or the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was tried on the failing micro-batch. ``minimal`` is the cure; removing any of its atoms fails again."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
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
    next_experiment: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another set of atoms that passes, with its class and its distance to float32."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    atoms: tuple[Atom, ...]
    safety: Safety
    passed: int
    runs: int
    loss_gap: float | None = None
    grad_cosine: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    kind: ActionKind
    atoms: tuple[Atom, ...] = ()
    reason: str = ""
    proof: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    at: StepId
    action: Action
    before: str = ""
    after: str = ""
    incident: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything about one incident: the public, versioned ``report.json``."""

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    schema: int = SCHEMA
    incident: Incident
    replay: Replay | None = None
    localization: Localization | None = None
    diagnoses: tuple[Diagnosis, ...] = ()
    proof: Proof | None = None
    audit: tuple[AuditEntry, ...] = ()
    count: int = 1
    failures: tuple[str, ...] = ()
    """Stages of the investigation that did not complete, with the reason."""
