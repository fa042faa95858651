"""How a run was set up: what its options ask for, and what its model was made into."""

from __future__ import annotations

from nanstop.records.record import record


@record
class PrecisionFacts:
    """The format that options ask for, and which do; ``RunFacts.autocast`` is in force."""

    requested: str | None = None
    option: str = ""
    tf32: bool | None = None


@record
class QuantizedFacts:
    """A base whose weights are packed.

    ``half_rest``: its other floating-point parameters (norms, embedding, head) in half precision,
    which ``prepare_model_for_kbit_training`` stores in float32. ``trained_base``: parameters of the
    base itself that are trained. ``num_adapted``: trainable parameters beside the base: adapters
    and saved modules.
    """

    method: str
    bits: int
    num_layers: int = 0
    compute_dtype: str | None = None
    half_rest: str | None = None
    trained_base: tuple[str, ...] = ()
    num_adapted: int = 0


@record
class AdapterFacts:
    """What PEFT's config of the active adapter says."""

    kind: str
    task_type: str | None = None
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    rank: int | None = None
    alpha: float | None = None


@record
class HeadFacts:
    """The head of a classifying model. ``pads``: whether it knows a padding token, or will."""

    module: str
    trained: bool
    pads: bool = True


@record
class ScheduleFacts:
    """Steps of the whole training, micro-batches on one rank; None for data without length."""

    scheduler: str = ""
    warmup_steps: int = 0
    num_steps: int | None = None
    micros_per_epoch: int | None = None


@record
class ObjectiveFacts:
    """``beta``: of DPO the inverse temperature, of GRPO and RLOO the weight of the KL term."""

    method: str
    beta: float | None = None
    num_generations: int | None = None


@record
class GradientPath:
    """Which trainable elements an update can reach.

    ``num_updated``: those that the optimizer holds; None without an optimizer. ``reentrant``:
    blocks are recomputed by reentrant checkpointing, through which only inputs that require
    gradients carry any. ``inputs_require_grad``: of the embedding's output; None where it was not
    asked. ``num_reached``: tensors that one backward gave a gradient, of ``num_tensors``; None
    where none was run.
    """

    num_trainable: int
    num_tensors: int
    num_updated: int | None = None
    reentrant: bool = False
    inputs_require_grad: bool | None = None
    num_reached: int | None = None
    unreached: tuple[str, ...] = ()
