"""A checkpoint with non-finite values is never written silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanstop.hosts.trainer.watched import WatchedTrainer
from nanstop.hosts.window.ends import WindowEnds
from nanstop.numerics.tensors import nonfinite
from nanstop.replay.held import at_rest
from nanstop.session.watched_run import WatchedRun
from nanstop.store.beside_weights import PLAN
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


_ELSEWHERE = "what another process has of the weights"


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
        self._create_card = watch.trainer.create_model_card
        self._frozen_checked = False
        self._inside = False
        self._last_good: Path | None = None

    def install(self) -> None:
        self._watch.patches.set(self._watch.trainer, "_save_checkpoint", self._on_save_checkpoint)
        self._watch.patches.set(self._watch.trainer, "save_model", self._on_save_model)
        self._watch.patches.set(self._watch.trainer, "create_model_card", self._on_card)

    def _on_save_checkpoint(self, model: Any, trial: Any = None) -> None:
        trainer = self._watch.trainer
        path = Path(trainer._get_output_dir(trial), f"checkpoint-{trainer.state.global_step}")
        self._guard(path, lambda: self._save_checkpoint(model, trial))

    def _on_save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        path = Path(output_dir or self._watch.trainer.args.output_dir)
        self._guard(path, lambda: self._save_model(output_dir, _internal_call))

    def _on_card(self, *args: Any, **kwargs: Any) -> None:
        """Say in a card that is written anew, as before a push, what the weights beside it need."""
        self._create_card(*args, **kwargs)
        folder, session = Path(self._watch.trainer.args.output_dir), self._watch.session
        if session is not None and (folder / PLAN).is_file():
            session.saved(folder)

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
                session.saved(path)
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
        if self._watch.facts.world_size > 1:
            # Processes that have parts of one model write it together, or not at all.
            replicas = self._watch.host.shared.of((self._watch.trainer.model_wrapped,))
            bad = (bad or (_ELSEWHERE,)) if replicas.anywhere(mine=bool(bad)) else ()
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
