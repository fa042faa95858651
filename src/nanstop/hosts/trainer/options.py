"""What ``TrainingArguments`` and TRL's configs ask for, as records.

Nothing of the model is looked at.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence, Sized
from typing import Any

from nanstop.hosts.accelerate.precision import FORMATS
from nanstop.measure.step_per_rate import step_per_rate
from nanstop.own_code import is_class_of
from nanstop.records import ObjectiveFacts, OptimizerFacts, PrecisionFacts, ScheduleFacts


def precision_of(args: Any) -> PrecisionFacts:
    """Return the format of mixed precision that the options ask for."""
    option = next((name for name in ("fp16", "bf16") if getattr(args, name, False)), None)
    return PrecisionFacts(
        requested=FORMATS[option] if option else None,
        option=f"{option}=True" if option else "",
        tf32=getattr(args, "tf32", None),
    )


def objective_of(args: Any) -> ObjectiveFacts | None:
    """Return the settings of a preference or reinforcement objective, None for others."""
    beta, group = _number(getattr(args, "beta", None)), group_size(args)
    if beta is None and group is None:
        return None
    method = next((c.__name__ for c in type(args).__mro__ if is_class_of(c, "trl")), "")
    return ObjectiveFacts(
        method=method.removesuffix("Config").lower(),
        beta=beta,
        num_generations=group,
    )


def group_size(args: Any) -> int | None:
    """Return how many answers to one prompt are compared by their rewards, None where a trainer
    that generates them (distillation) weighs no reward.
    """
    size = _number(getattr(args, "num_generations", None))
    return int(size) if size is not None and hasattr(args, "reward_weights") else None


def schedule_of(args: Any, data: Any, world_size: int = 1) -> ScheduleFacts:
    """Return the schedule of the learning rate against the length of the training."""
    per_epoch = _micros_per_epoch(args, data, world_size)
    steps: int | None = int(args.max_steps) if args.max_steps > 0 else None
    if steps is None and per_epoch is not None:
        an_epoch = math.ceil(per_epoch / args.gradient_accumulation_steps)
        steps = math.ceil(args.num_train_epochs * max(1, an_epoch))
    kind = args.lr_scheduler_type
    return ScheduleFacts(
        scheduler=str(getattr(kind, "value", kind)),
        warmup_steps=int(args.get_warmup_steps(steps)) if steps is not None else 0,
        num_steps=steps,
        micros_per_epoch=per_epoch,
    )


def _micros_per_epoch(args: Any, data: Any, world_size: int) -> int | None:
    """Return how many micro-batches of one rank an epoch has, None where the data has no length."""
    rows = len(data) if isinstance(data, Sized) else 0
    if not rows:
        return None
    if hasattr(args, "num_generations") and hasattr(args, "steps_per_generation"):
        # Each prompt stands in the batch once for each of its generations, in each iteration again.
        rows *= args.num_generations * (getattr(args, "num_iterations", 1) or 1)
    batch = args.per_device_train_batch_size * max(1, getattr(args, "n_gpu", 1) or 1)
    return math.ceil(rows / (batch * world_size))


def planned_optimizer(args: Any, model: Any = None) -> OptimizerFacts | None:
    """Return the optimizer that a trainer will make, None where that cannot be told without
    making it.
    """
    from transformers import Trainer

    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    except Exception:  # a missing library or a model that it needs: train() will say so
        return None
    own = inspect.signature(kind).parameters
    default = {name: one.default for name, one in own.items() if one.default is not one.empty}
    betas = tuple(settings.get("betas", default.get("betas")) or ())
    bits = settings.get("optim_bits", default.get("optim_bits"))
    return OptimizerFacts(
        name=kind.__name__,
        lr=_number(settings.get("lr")),
        per_rate=step_per_rate(kind, default | settings),
        eps=_number(settings.get("eps", default.get("eps"))),
        betas=_pair(betas),
        momentum=_number(settings.get("momentum")),
        weight_decay=_number(args.weight_decay),
        # An option of bitsandbytes; of others, which are not made yet, the name alone tells.
        state_bits=8 if bits == 8 or "8bit" in kind.__name__ else None,
        fused=bool(settings.get("fused")),
    )


def _pair(values: Sequence[Any]) -> tuple[float, float] | None:
    numbers = [number for number in map(_number, values) if number is not None]
    return (numbers[0], numbers[1]) if len(numbers) == len(values) == 2 else None


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known else None
