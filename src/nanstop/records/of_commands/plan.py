"""In which format each part of a model computes, and what shows that this agrees with float32."""

from __future__ import annotations

from nanstop.records.record import record
from nanstop.records.verdict import Atom
from nanstop.records.vocabulary import SCHEMA


@record
class Region:
    """Modules that run one after the other, in a format of their own;
    casts stand at the outer edge alone.

    ``reason``: what goes wrong without it, as measured.
    """

    modules: tuple[str, ...]
    dtype: str = "float32"
    reason: str = ""


@record
class ScalerSettings:
    """What ``torch.amp.GradScaler`` begins with."""

    init_scale: float = 65536.0


@record
class Agreement:
    """Distance of a planned run to float32 on the calibration data, the worst of all micro-batches.

    ``loss_gap``: relative. ``update_loss_gap``: of the losses along ``num_updates`` updates;
    ``update_loss_bound``: how large that may be, as the distance that the first step is allowed
    leads there. ``update_share``: how far they went along float32's gradients, against float32's
    own updates (near 0: they were lost to rounding). ``headroom_bits``: the least of any value that
    is in the plan's format, gradients as they are scaled; ``headroom_at``: the module that holds
    it. ``matmul_share``: of the multiplications of matrix products, how many are in that format.
    """

    loss_gap: float
    grad_cosine: float
    num_updates: int
    update_loss_gap: float
    update_share: float
    headroom_bits: float
    headroom_at: str = ""
    matmul_share: float = 1.0
    update_loss_bound: float = 1e-3


@record
class PlanCost:
    """What the regions add to a step (forward and backward of one micro-batch) of the plan's format
    alone.

    ``casts``: conversions between formats; ``bytes``: written by all operations.
    Counted, so that they hold on any device.
    """

    casts: int
    bytes: int


@record
class Calibration:
    """What a plan was measured on, and how much was tried. ``data``: where the batches came from.

    ``num_unseen``: of the batches and padded copies, how many were held out until a plan passed on
    the others; ``num_padded``: copies of a batch with padded rows, beside the ``num_batches``.
    ``complete``: whether every region was shown to be necessary; else the time was up, and fewer
    may do.
    """

    num_batches: int
    num_tokens: int = 0
    data: str = ""
    lr: float = 0.0
    trials: int = 0
    seconds: float = 0.0
    complete: bool = True
    num_unseen: int = 0
    num_padded: int = 0


@record
class PrecisionPlan:
    """The smallest change under which a run in ``dtype`` agrees with float32;
    or, with ``reason``, why there is none.

    ``dtype``: the format that everything computes in by default ("" where a run's own is left as it
    is). ``trainables``: the format in which trainable parameters and their optimizer state are kept
    ("": as they are stored), because of ``trainables_reason``. ``logits``, ``loss``: the formats of
    the output head and of the loss (``logits_reason``: why the head is not in ``dtype``).
    ``attention``: the kernel, "" for the model's own, because of ``attention_reason``.
    ``remedies``: further switches, such as those that a run adopted.
    """

    schema: int = SCHEMA
    model: str = ""
    dtype: str = ""
    regions: tuple[Region, ...] = ()
    trainables: str = ""
    trainables_reason: str = ""
    logits: str = ""
    logits_reason: str = ""
    loss: str = ""
    scaler: ScalerSettings | None = None
    attention: str = ""
    attention_reason: str = ""
    remedies: tuple[Atom, ...] = ()
    reason: str = ""
    agreement: Agreement | None = None
    cost: PlanCost | None = None
    calibration: Calibration | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """Return every module of every region."""
        return tuple(name for region in self.regions for name in region.modules)
