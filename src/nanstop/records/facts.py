"""What is known of a run beside its failures: set-up, machine, sampled ranges."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from nanstop.records.record import record
from nanstop.records.setup import (
    AdapterFacts,
    ClippingFacts,
    DataFacts,
    GradientPath,
    HeadFacts,
    ModeFacts,
    ObjectiveFacts,
    PrecisionFacts,
    QuantizedFacts,
    RateFacts,
    ScheduleFacts,
    TextFacts,
)
from nanstop.records.update import (
    AccumulationFacts,
    DeviceFacts,
    LoadFacts,
    ReplicaFacts,
    ResumeFacts,
)
from nanstop.records.values import SourceLine, TensorStats
from nanstop.records.vocabulary import Phase


@record
class UpdateRow:
    """Of one parameter: how many elements an update should have moved and did not."""

    parameter: str
    dtype: str
    num_lost: int
    num_total: int


@record
class ParamGroup:
    """Parameters of one storage format and one trainability, with a few of their names."""

    dtype: str
    trainable: bool
    num_tensors: int
    num_elements: int
    examples: tuple[str, ...] = ()


@record
class StateFault:
    """A tensor of an optimizer's state, as ``PARAMETER:KEY``, that no update can have made."""

    name: str
    kind: Literal["nonfinite", "negative", "vanished", "shape"]
    num_bad: int = 0
    """Elements that are not finite, negative in a sum of squares, or 0 where they cannot be."""
    detail: str = ""


@record
class StepPerRate:
    """What a step of an optimizer is that does not depend on the gradient.

    ``length``: by how much it moves a weight at a learning rate of 1, as a copy of the optimizer
    has moved those of a small matrix; ``relative``: in sizes of the weights.
    """

    length: float
    relative: bool = False


@record
class StepLength:
    """The group of parameters whose weights are the smallest beside its learning rate.

    ``weight``: the size of a typical one (root mean square), in the tensors whose size carries a
    signal. ``length``: by how much a step moves a weight.
    """

    lr: float
    length: float
    weight: float


@record
class OptimizerFacts:
    name: str
    lr: float | None = None
    """The rate of its first group."""
    highest: float | None = None
    """The highest rate of its groups, where one has another than the first: infinite, or not a
    number, where one is.
    """
    scheduled: float | None = None
    """The rate that a schedule multiplies, None where there is none."""
    given: float | None = None
    """The rate that it was made with."""
    per_rate: StepPerRate | None = None
    """None where a step depends on the gradient, or that could not be tried."""
    step: StepLength | None = None
    """None without ``per_rate``, and where no weight has a size to compare."""
    eps: float | None = None
    betas: tuple[float, float] | None = None
    momentum: float | None = None
    """The highest of its groups."""
    weight_decay: float | None = None
    state_bits: int | None = None
    """8 for an 8-bit optimizer, else None."""
    fused: bool = False
    """Whether one kernel makes the update: it computes in float32 and rounds what it stores."""
    state_faults: tuple[StateFault, ...] = ()
    """What was wrong with its state when the run began: one that was restored."""

    @property
    def rate(self) -> float | None:
        """The highest rate at which it moves anything."""
        return self.lr if self.highest is None else self.highest


@record
class TokenRows:
    """Rows of an embedding or head that look untrained: all zero, or far off the usual norm."""

    parameter: str
    num_rows: int
    zero_rows: tuple[int, ...] = ()
    outlier_rows: tuple[int, ...] = ()
    median_norm: float = 0.0
    tied: bool = False
    trainable: bool = False


@record
class BatchFact:
    """One entry of a micro-batch: its range; for labels, how many rows are all -100."""

    micro: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    minimum: float | None = None
    maximum: float | None = None
    num_bad: int = 0
    bad_rows: tuple[int, ...] = ()
    """Places along the first axis that hold what is not finite, the first of them."""
    hides: bool = False
    """Whether it is a mask to be added: 0 and -Inf, nothing else."""
    num_rows_without_labels: int | None = None
    num_rows: int | None = None
    num_supervised: int | None = None
    outlier_row: int | None = None
    """The sample with the largest magnitude, in a floating-point entry of three samples or more."""
    outlier_ratio: float | None = None
    """That magnitude over the median of the other samples' largest ones."""


@record
class CommandFacts:
    """What was started. ``config``: the YAML or JSON file that it was given.

    ``options``: names of options only, never a value. ``supervised``: by ``nanstop run``.
    """

    script: str | None = None
    config: str | None = None
    options: tuple[str, ...] = ()
    supervised: bool = False

    @property
    def script_name(self) -> str | None:
        """The script without its folder."""
        return PurePath(self.script).name if self.script else None


@record
class Environment:
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
    command: CommandFacts | None = None


BY_HAND = "the script changes its weights by itself, with no optimizer"
"""What ``RunFacts.veto`` says of a loop that was written so."""

HOOKED = "a hook after gradient accumulation updates weights inside backward"
INSIDE = "a hook on gradients updates the weights inside backward"
"""What it says where the weights have their update once a backward is over."""


@record
class RunFacts:
    """Standing facts of a run, read once when watching starts.
    ``veto``: "yes", or why an update cannot be stopped.
    """

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
    optimizer_at: SourceLine | None = None
    """The line that made the optimizer, None where that was not seen."""
    schedule_at: SourceLine | None = None
    """The line that made the schedule of its rates, None where that was not seen."""
    stepped_at: SourceLine | None = None
    """The line that stepped that schedule by the time these facts were read, None where none
    had."""
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
    ranks_agree: bool = False
    """Whether the processes that train together can act as one: each has a copy of the model."""
    device: str = "cpu"
    veto: str = "yes"
    precision: PrecisionFacts | None = None
    quantized: QuantizedFacts | None = None
    adapter: AdapterFacts | None = None
    head: HeadFacts | None = None
    schedule: ScheduleFacts | None = None
    rates: RateFacts | None = None
    mode: ModeFacts | None = None
    """That a model was left in evaluation mode; None where that was not seen."""
    text: TextFacts | None = None
    data: DataFacts | None = None
    objective: ObjectiveFacts | None = None
    gradient_path: GradientPath | None = None
    sinks: tuple[str, ...] = ()
    """What a loop did first with the gradients of its first window: "unscale" or "clip", or with
    those of a scaled loss "update"; "scale" where the loop multiplied its loss itself; "closure"
    where an update has evaluated one; empty where none of them.
    """
    sink_at: SourceLine | None = None
    """The line that did the first of these."""
    loss_factor: float | None = None
    """The large number that a loop has multiplied its loss by itself, ahead of the first backward;
    None where it has not.
    """
    updated_at: SourceLine | None = None
    """The line that asked for the first update of a loop, where nothing was done with its gradients
    ahead of that."""
    clipping: ClippingFacts | None = None
    """That gradients were clipped before there were any; None where that was not seen."""
    infinite_norm_at: int | None = None
    """The first step whose finite gradients have an infinite norm by which the host would have
    clipped to infinity: every gradient NaN, where they were left as they are. None where none had.
    """
    resume: ResumeFacts | None = None
    loaded: LoadFacts | None = None
    """What the model's weights lacked when they were loaded; None where they fitted."""
    accumulation: AccumulationFacts | None = None
    replicas: ReplicaFacts | None = None
    """How copies of the model differ that several ranks keep alike; None where none was seen to."""
    ranks_given_same: int = 0
    """How many ranks were given the very same first batches; 0 where that was not seen."""
    devices: DeviceFacts | None = None
    """What the ranks' devices made of one micro-batch, None where they were not asked."""
    odd_weights: tuple[TensorStats, ...] = ()
    """Weights that were not finite, or far too large, as they were loaded: when the run began."""
    left_weights: tuple[TensorStats, ...] = ()
    """Weights that were so because an earlier training in the same process had left them so."""

    @property
    def is_updated_inside(self) -> bool:
        """Return whether a step's update is made by the time that its backward is over."""
        return self.veto in (HOOKED, INSIDE)


@record
class RangeRow:
    """Range of one op's output under the gauge or the probe, read against the format ``dtype``.

    ``growth``: doublings a step, where a fit was good enough; ``reaches``: the first and the last
    step between which the range then leaves its format, foretold at step ``at``.
    """

    module: str
    op: str
    dtype: str
    absmax: float
    headroom_bits: float
    growth: float | None = None
    phase: Phase = "forward"
    at: int | None = None
    reaches: tuple[int, int] | None = None
