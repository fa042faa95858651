"""A checkpoint with non-finite values is never written silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.hosts.window_end import WindowEnds
from nanstop.numerics.tensors import nonfinite
from nanstop.records import PrecisionPlan
from nanstop.replay.held import at_rest
from nanstop.session.watched_run import WatchedRun
from nanstop.store.plan_file import load_plan, save_plan
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


PLAN = "nanstop-plan.yaml"
"""The remedies that a checkpoint's run was under, beside its weights."""


def plan_of(checkpoint: str | None) -> PrecisionPlan:
    """Return the plan that a checkpoint was saved under, an empty one without.

    Errors: ``NanstopError`` if damaged.
    """
    path = Path(checkpoint or "", PLAN)
    return load_plan(path) if checkpoint and path.is_file() else PrecisionPlan()


class CheckpointGuard:
    """Scans parameters before each save: saving reads all of them anyway.

    A bad state is not written. What is kept instead is the last good checkpoint, or the last
    snapshot, written beside the refused path with ``-last-good`` at its end. The session is told,
    and resolves whether the run goes on.
    """

    def __init__(self, watch: WatchedTrainer, ends: WindowEnds) -> None:
        self._watch = watch
        self._ends = ends
        self._save_checkpoint = watch.trainer._save_checkpoint
        self._save_model = watch.trainer.save_model
        self._frozen_checked = False
        self._inside = False
        self._last_good: Path | None = None

    def install(self) -> None:
        self._watch.patches.set(self._watch.trainer, "_save_checkpoint", self._on_save_checkpoint)
        self._watch.patches.set(self._watch.trainer, "save_model", self._on_save_model)

    def _on_save_checkpoint(self, model: Any, trial: Any = None) -> None:
        trainer = self._watch.trainer
        path = Path(trainer._get_output_dir(trial), f"checkpoint-{trainer.state.global_step}")
        self._guard(path, lambda: self._save_checkpoint(model, trial))
        in_force = self._watch.session.in_force if self._watch.session is not None else ()
        if in_force and path.is_dir():
            save_plan(PrecisionPlan(remedies=in_force), path / PLAN)

    def _on_save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        path = Path(output_dir or self._watch.trainer.args.output_dir)
        self._guard(path, lambda: self._save_model(output_dir, _internal_call))

    def _guard(self, path: Path, save: Any) -> None:
        session = self._watch.session
        if self._inside or session is None:
            save()
            return
        self._inside = True
        try:
            bad = self._bad_parameters()
            if bad:
                self._refuse(session, path, bad)
            else:
                with at_rest(self._watch.host.root):
                    save()
                self._last_good = path
        finally:
            self._inside = False

    def _bad_parameters(self) -> tuple[str, ...]:
        root = self._watch.host.root
        scanned = {
            name: parameter
            for name, parameter in root.named_parameters()
            if parameter.requires_grad or not self._frozen_checked
        }
        # What was so when it was loaded, and let the training be finite, is not this run's doing.
        before = {stats.name for stats in self._watch.facts.odd_weights if not stats.finite}
        bad = tuple(name for name in nonfinite(scanned) if name not in before)
        self._frozen_checked = self._frozen_checked or not bad
        return bad

    def _refuse(self, session: WatchedRun, path: Path, bad: tuple[str, ...]) -> None:
        kept = self._last_good
        snapshot = self._ends.keeper.snapshot
        if kept is None and snapshot is not None and path.name:
            kept = path.with_name(f"{path.name}-last-good")
            with snapshot.loaded(), at_rest(self._watch.host.root):
                self._save_model(str(kept), True)
        decision = session.checkpoint_refused(str(path), bad, str(kept or ""))
        if decision.kind == "stop":
            self._watch.stop(decision)
