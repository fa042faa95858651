"""DeepSpeed's engine: every process has the whole model for its forward and backward, and a part
of the gradients and of what an update needs (ZeRO-1 and 2), a part of the weights too (ZeRO-3), or
all of it (no ZeRO).

The engine makes backward and update itself; what it has for gradient accumulation and for steps
that overflow is what nanstop uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from nanstop.decide.agreement import Ranks
from nanstop.decide.apart import ByItself
from nanstop.detect.sentinel import norm_of_gradients
from nanstop.hosts.replicas import OneCopy, Replicas
from nanstop.hosts.sharded.alike.terms import Terms
from nanstop.hosts.sharded.flags import ByFlags, FailureFlags
from nanstop.numerics.tensors import nonfinite
from nanstop.records import ReplicaFacts, SourceLine
from nanstop.replay.undo import exchanged

_PLAIN, _GRADIENTS = 0, 2
"""Stages of ZeRO: none, and the last in which every process has all weights."""
NEEDS_OTHERS = "DeepSpeed's engine takes the other processes to it"
_LIBRARY = "deepspeed.runtime.engine"
_APPLIES = "DeepSpeed applies the update inside its engine"


def engine_class() -> Any:
    """Return the class of DeepSpeed's engines, None where it was not imported."""
    library = sys.modules.get(_LIBRARY)
    return getattr(library, "DeepSpeedEngine", None)


def scaling_class() -> Any:
    """Return the class of its optimizers that multiply a loss by a scale, None where there is
    none.
    """
    return getattr(sys.modules.get("deepspeed.runtime.base_optimizer"), "ZeROOptimizer", None)


def is_engine(module: nn.Module) -> bool:
    return _LIBRARY in sys.modules and isinstance(module, engine_class() or ())


def inside_engine(module: nn.Module) -> nn.Module:
    """Return the model inside an engine, if this process can run it without the others; the module
    itself where it cannot, or is no engine.
    """
    return Engine(module).inside if is_engine(module) else module


def needs_others(called: Iterable[nn.Module], replicas: Replicas) -> str:
    """Return why a window that calls models as they are wrapped cannot be run again, or ""."""
    engines = filter(is_engine, called)
    alone = (not isinstance(replicas, OneCopy) and inside_engine(one) is not one for one in engines)
    return "" if all(alone) else NEEDS_OTHERS


class Engine:
    """What nanstop asks of an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._zero = engine.optimizer
        self._stage = int(engine.zero_optimization_stage())

    @property
    def _is_plain(self) -> bool:
        """Whether the optimizer is torch's own, of the model's parameters."""
        return self._stage == _PLAIN and self._zero is self.engine.basic_optimizer

    @property
    def is_whole(self) -> bool:
        """Whether this process can run forward and backward without the others."""
        holds_back = self._is_plain or hasattr(self._zero, "_coalesce_grad_reduction")
        return self._stage <= _GRADIENTS and holds_back and not self._is_another()

    @property
    def has_all_gradients(self) -> bool:
        """Whether this process has the gradients of all that is trained, as all others have."""
        return self._is_plain

    def _is_another(self) -> bool:
        engine = self.engine
        asked = ("pipeline_parallelism", "zenflow", "has_moe_layers", "is_compiled")
        return any(getattr(engine, name, False) for name in asked)

    @property
    def inside(self) -> nn.Module:
        return self.engine.module if self.is_whole else self.engine

    @property
    def trains_with_all(self) -> bool:
        """Whether all processes of the run have the same model of it."""
        engine = self.engine
        alone = getattr(engine, "mp_world_size", 1) == getattr(engine, "sequence_parallel_size", 1)
        sizes = (getattr(engine, "dp_world_size", 0), distributed.get_world_size())
        return alone and sizes[0] == sizes[1] and not engine.pipeline_parallelism

    @property
    def scale(self) -> float:
        """The loss scale that is on the gradients."""
        return float(getattr(self._zero, "loss_scale", 1.0))

    def exchanges(self) -> bool:
        """Return whether the backward of a call now ends with every rank's gradients."""
        return self.engine.is_gradient_accumulation_boundary()

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of the gradients that an update is to be made of."""
        held = getattr(self._zero, "averaged_gradients", None)
        if held is None:
            named = self.engine.module.named_parameters()
            return {name: p.grad for name, p in named if p.grad is not None}
        return {
            f"{group}.{place}": part
            for group, parts in held.items()
            for place, part in enumerate(parts or ())
            if isinstance(part, Tensor) and part.numel()
        }

    def norm(self) -> Tensor | None:
        """Return the norm of this rank's part of the gradients, None where that is left to a loss
        scale.
        """
        held = list(self.gradients().values())
        return norm_of_gradients(held) if held and self.scale <= 1 else None

    def no_veto(self) -> str:
        """Return why an update of it cannot be left out, or ""."""
        if self._is_plain or self._overflows_by_itself:
            return ""
        return _APPLIES

    @property
    def _overflows_by_itself(self) -> bool:
        """Whether an update of gradients that are not finite is left out by the engine, on all
        ranks, as far as it is told to look.
        """
        zero = self._zero
        return (
            hasattr(zero, "averaged_gradients")
            and hasattr(zero, "overflow")
            and not (self._is_offloaded and self._stage > _GRADIENTS)
            and not self._is_another()
        )

    @property
    def is_guarded(self) -> bool:
        """Whether it looks for such gradients as it was told to: of bfloat16 it may not."""
        looks = (
            getattr(self._zero, "check_grad_overflow", True) or not self.engine.bfloat16_enabled()
        )
        return looks and self._overflows_by_itself

    @property
    def _is_offloaded(self) -> bool:
        names = ("cpu_offload", "offload_optimizer", "swap_optimizer")
        return any(getattr(self._zero, name, False) for name in names)

    def leave_out(self, update: Callable[[], object]) -> None:
        """Have the engine go on without the ``update``, as after an overflow: its schedule waits,
        and a loss scale stays as it is. Every rank calls it.
        """
        engine = self.engine
        if self._is_plain:
            engine.zero_grad()
            engine.losses = None
            engine.skipped_steps += 1
            engine.global_steps += 1
            engine.global_samples += engine.train_batch_size()
            return
        # ZeRO-3 looks at its norm in every format; room beside a parameter, which may be the first
        # element there, is never written again.
        if self._stage <= _GRADIENTS:
            for part in self.gradients().values():
                part[(0,) * part.dim()].fill_(torch.nan)
            if self._is_offloaded:
                self._zero.local_overflow = True  # until the update has been left out
        looks = "check_grad_overflow"
        scaler = getattr(self._zero, "loss_scaler", None)
        with ExitStack() as undo:
            if scaler is not None:
                undo.callback(vars(scaler).update, dict(vars(scaler)))
            if hasattr(self._zero, looks):
                undo.enter_context(exchanged(vars(self._zero), {looks: True}))
            update()

    def obstacle(self) -> str:
        """Return why gradients cannot be made anew on every rank, or ""."""
        engine, zero = self.engine, self._zero
        if not self.is_whole:
            return "DeepSpeed lays the weights out on all ranks" if self._stage else _APPLIES
        if self._is_offloaded:
            return "DeepSpeed keeps the gradients in host memory"
        if getattr(zero, "use_grad_accum_attribute", False) and self._num_micros() > 1:
            return "DeepSpeed sums up the gradients in another format"
        manages = getattr(engine, "managed_gradient_accumulation", lambda: True)
        return "" if manages() else "the script tells DeepSpeed when to exchange gradients"

    def _num_micros(self) -> int:
        return int(self.engine.gradient_accumulation_steps())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have forward and backward of its model exchange nothing inside, and leave gradients where
        torch does; whoever asks for an update gets none. The engine is as it was afterwards.
        """
        engine, zero = self.engine, self._zero
        hooks = getattr(zero, "_backward_hook_state", None)
        told: dict[str, Any] = {"enable_backward_allreduce": False, "step": _no_update}
        held = {"_coalesce_grad_reduction": True}
        with ExitStack() as undo:
            if hooks is not None:
                undo.callback(vars(hooks).update, dict(vars(hooks)))
                hooks.backward_active_depth, hooks.backward_seen_this_step = 0, False
            undo.enter_context(exchanged(vars(engine), told))
            if not self._is_plain:
                undo.enter_context(exchanged(vars(zero), held))
            yield

    def clear(self) -> None:
        """Forget the gradients of its parameters."""
        for parameter in self.engine.module.parameters():
            parameter.grad = None
            if hasattr(parameter, "grad_accum"):
                parameter.grad_accum = None

    def exchange(self) -> None:
        """Have the gradients that its parameters have, those of a whole window, become what an
        update is made of. Every rank calls it.
        """
        if self._is_plain:
            self.engine.allreduce_gradients()
            return
        self._zero.backward_epilogue()  # where it sums up beside ``grad``
        with self.engine.coalesce_grad_reduction():
            pass  # what there is is exchanged at the end of it


def _no_update(*_args: Any, **_kwargs: Any) -> None:
    pass


class EngineReplicas(ByFlags):
    """See ``Replicas``. Of an engine that all ranks train with."""

    is_whole = goes_back = False

    def __init__(self, engine: Any, ranks: Ranks, flags: FailureFlags | None, terms: Terms) -> None:
        super().__init__(ranks, flags)
        self._engine = Engine(engine)
        self._terms = terms

    def parts(self) -> dict[str, Tensor]:
        return self._engine.gradients()

    def whole(self, ranks: Ranks) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def obstacle(self) -> str:
        return self._engine.obstacle()

    def alone(self) -> AbstractContextManager[None]:
        return self._engine.alone()

    def begin(self) -> None:
        self._engine.clear()

    def average(self) -> None:
        self.exchange_or_leave(self._engine.exchange)

    def by_itself(self, *, asked: bool) -> ByItself:
        if asked or not self._terms.are_alike:
            return "skip" if self._terms.are_alike else ""  # which all know of
        if self._engine.is_guarded or not nonfinite(self._engine.gradients()):
            return ""  # its update is one of all ranks: where it overflows, all leave it out
        return "skip" if self._engine.has_all_gradients else "stop"

    def compare(self, step: int, terms: str | None) -> ReplicaFacts | None:  # noqa: ARG002
        self._terms.compare(terms)
        return None  # weights are sent anew after every update

    def updating(
        self, optimizer: Any, written_at: tuple[SourceLine, ...], *, is_late: bool
    ) -> None:
        pass
