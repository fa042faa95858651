"""What a window's reading or an exception says: nothing, or the signals of an incident."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from nanstop.detect.sentinel import Reading, nonfinite_gradients, read_window, tally_gradients
from nanstop.hosts import compat
from nanstop.hosts.trainer.step import Reentry, Window
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.weights import MAX_LISTED
from nanstop.records import Phase, Signal, SignalSource, StepId, TensorStats

MAX_NAMED = 8
"""Names of one kind that a report lists; the first bad ones say as much as hundreds."""
PATIENCE = 4
"""Overflows in a row that a loss scale is allowed before they are an incident: it falls 16-fold meanwhile."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An incident as the sentinel sees it. ``bad_params`` and ``bad_state`` were bad before this step's forward."""

    signals: tuple[Signal, ...]
    phase: Phase
    error: BaseException | None = None
    bad_params: tuple[str, ...] = ()
    bad_state: tuple[str, ...] = ()


class Judge:
    """Reads windows of one trainer. ``at(micro=...)`` makes a ``StepId`` of the present step."""

    def __init__(self, host: Reentry, at: Callable[..., StepId]) -> None:
        self._host = host
        self._at = at
        self._overflows = 0

    def read(self, window: Window, norm: Tensor) -> Reading:
        """Return the window's values on the host: the one synchronisation of a healthy window."""
        losses = [m.loss for m in window.micros if m.loss is not None]
        return read_window(losses, norm, self._found_inf())

    def of_reading(self, reading: Reading) -> Verdict | None:
        """Return what is wrong, or None.

        A scaler's overflow with finite losses is its everyday work; only a row of them is reported. An infinite norm
        of finite gradients is no failure of any gradient. The phase is where the first sign was seen; an investigation
        says itself where the failure was born.
        """
        if reading.quiet:
            self._overflows = 0
            return None
        if reading.bad_losses:
            signals = tuple(
                Signal(source="loss", value=reading.losses[i], at=self._at(micro=i))
                for i in reading.bad_losses
            )
            return self.with_weights(signals, "forward")
        if reading.found_inf:
            self._overflows += 1
            if self._overflows < PATIENCE:
                return None
            scale = float(compat.run_scaler(self._host.trainer).get_scale())
            self._overflows = 0
            signal = Signal(source="scaler", value=scale, threshold=PATIENCE, at=self._at())
            return self.with_weights((signal,), "backward")
        bad = nonfinite_gradients(self._host.root.named_parameters())
        if not bad:
            return None
        first, *others = self._named("grad", bad, reading.norm)
        tally = tally_gradients(p.grad for p in self._host.root.parameters())
        return self.with_weights((replace(first, gradients=tally), *others), "backward")

    def of_exception(self, error: BaseException, phase: Phase, micro: int | None = None) -> Verdict:
        """Return the incident that an exception with a numeric signature is."""
        name, message = type(error).__name__, str(error)[:2000]
        signal = Signal(source="exception", name=name, message=message, at=self._at(micro=micro))
        if "device-side assert" in message or "CUDA error" in message:
            # The CUDA context is gone: asking any tensor anything raises again.
            return Verdict((signal,), phase, error)
        return self.with_weights((signal,), phase, error)

    def of_weights(
        self, odd: Sequence[TensorStats], before: Collection[str] = ()
    ) -> Verdict | None:
        """Return whether trainable parameters, of which ``odd`` stand out, are bad now that were not ``before``."""
        if len(odd) < MAX_LISTED and all(stats.finite for stats in odd):
            return None
        named = self._host.trainable().parameters
        bad = nonfinite({name: p for name, p in named.items() if name not in before})
        return self.with_weights(self._named("param", bad), "optimizer") if bad else None

    def with_weights(
        self, signals: tuple[Signal, ...], phase: Phase, error: BaseException | None = None
    ) -> Verdict:
        params = nonfinite(dict(self._host.root.named_parameters()))
        state = nonfinite(self._host.trainable().state_tensors())
        if not any(s.source == "param" for s in signals):
            signals += self._named("param", params)
        signals += self._named("state", state)
        return Verdict(signals, phase, error, params, state)

    def _named(
        self, source: SignalSource, names: tuple[str, ...], value: float | None = None
    ) -> tuple[Signal, ...]:
        more = f"and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return tuple(
            Signal(source=source, name=name, value=value, message=more, at=self._at())
            for name in names[:MAX_NAMED]
        )

    def _found_inf(self) -> list[Tensor]:
        scaler: Any = compat.run_scaler(self._host.trainer)
        if scaler is None:
            return []
        states = scaler._per_optimizer_states.values()
        return [flag for state in states for flag in state["found_inf_per_device"].values()]
