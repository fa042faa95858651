"""What ``nanstop.watch`` gives back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanstop.errors import TrainingStopped
from nanstop.records import Diagnosis, Report
from nanstop.store.incidents import Store
from nanstop.tracebacks import passes_through

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nanstop.commands.plan.plan import Applied
    from nanstop.report.run_report import RunReport

__tracebackhide__ = passes_through


class Watch:
    """A watch on a run. ``close()`` (or leaving its ``with`` block) restores everything that was
    patched.
    """

    def __init__(self, inner: Any, store: Store, applied: Applied | None = None) -> None:
        self._inner = inner
        self._store = store
        self._applied = applied

    @property
    def incidents(self) -> tuple[Report, ...]:
        """What failed so far, one report for each kind of failure."""
        session = self._inner.session
        return tuple(session.reports) if session is not None else ()

    @property
    def findings(self) -> tuple[Diagnosis, ...]:
        """What is silently wrong or about to fail, but has not failed."""
        session = self._inner.session
        return tuple(session.findings) if session is not None else ()

    @property
    def folder(self) -> Path:
        """Where the incidents of this run are kept."""
        return self._store.folder

    def report(self) -> RunReport:
        """Return all that happened so far, to print or to show in a notebook."""
        from nanstop.report.run_report import RunReport

        session = self._inner.session
        return session.report() if session is not None else RunReport((), (), 0, 0.0)

    def close(self) -> None:
        """End the watch; calling it again does nothing."""
        self._end()

    def _end(self, *exit_code: int) -> None:
        self._inner.close(*exit_code)
        if self._applied is not None:
            self._applied.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool | None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.report().outcome}, in {self.folder}>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


class LoopWatch(Watch):
    """A watch on a raw PyTorch loop.
    ``ends``: a stop ends the ``with`` block, and no more than that.
    """

    def __init__(
        self, inner: Any, store: Store, applied: Applied | None = None, *, ends: bool = False
    ) -> None:
        super().__init__(inner, store, applied)
        self._ends = ends

    def __enter__(self) -> LoopWatch:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        try:
            self._end(0 if kind is None else 1)
        except TrainingStopped:  # of the last update; an exception on its way goes before
            if error is None and not self._ends:
                raise
        return self._ends and isinstance(error, TrainingStopped)

    def step(self, loss_fn: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Run ``loss_fn(batch)`` and its backward as one micro-batch; return the detached loss."""
        return self._inner.step(loss_fn, batch)

    def update(
        self, clip: float | None = 1.0, scaler: Any = None, scheduler: Any = None
    ) -> Tensor | None:
        """Clip, step and zero the gradients; return their norm, or None if the update was left out.

        Errors: ``TrainingStopped`` where training is not worth going on with.
        """
        return self._inner.update(clip=clip, scaler=scaler, scheduler=scheduler)


class Off:
    """Stands in for a watch when ``NANSTOP=off``."""

    session = None

    def close(self) -> None:
        """Nothing was patched."""
