"""In place of the training that a script asks for, one job on what the script has built.

Then the process ends.

The job gets a ``Target``. A trainer is met at its first ``train()``, before it trains; a raw loop
at its first optimizer step, with the window that leads to it.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, cast

from nanstop.errors import NanstopError
from nanstop.hosts.patch_table import Table
from nanstop.numerics.trained import held_by
from nanstop.process.inject.dry_run import DryRun, answered
from nanstop.process.inject.save_nothing import save_nothing
from nanstop.ranks import is_first
from nanstop.records.codec import to_json
from nanstop.session.first_window import FirstWindow
from nanstop.session.watched_run import OpenSession
from nanstop.store.files import write_whole


class JobModule(Protocol):
    """What the module of a job offers; of these only ``run`` is asked of every one.

    ``ON_EVERY_RANK``: whether all ranks have to do it together, because it trains.
    """

    ON_EVERY_RANK: bool

    def run(self, target: Target, options: Mapping[str, Any]) -> Any:
        """Return the record that answers the process above."""
        ...

    def open_loop(self, dry_run: DryRun, table: Table) -> OpenSession | None:
        """Return what a raw loop opens in place of a session, None if this has seen to the loop
        by itself.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a script was about to train.

    ``trainer``: None for a raw loop. ``step``: the first window of a raw loop where it can be run
    again, else None; a trainer has had no batch yet. ``train``: carries the training out, with the
    arguments that the script gave.
    """

    view: Any
    facts: Any
    trainer: Any = None
    step: Any = None
    train: Callable[[], Any] | None = None
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), MappingProxyType({}))


def install(table: Table, trainer_class: Any, dry_run: DryRun) -> None:
    """Have the first ``train()`` of any trainer do the job, and no trainer create a repository
    to push to.
    """
    table.replace(trainer_class, "train", partial(_train, dry_run, table, trainer_class))
    table.replace(trainer_class, "init_hf_repo", lambda *_args, **_options: None)


def loop_opener(dry_run: DryRun, table: Table) -> OpenSession | None:
    """Return what raw loops open in place of a session.

    The job's own, else one that does the job at the first step.
    """
    open_loop = getattr(_job(dry_run), "open_loop", None)
    if open_loop is not None:
        return open_loop(dry_run, table)
    return _first_window(dry_run)


def _job(dry_run: DryRun) -> JobModule:
    """Return the module of a dry run's job.

    What comes from the environment may name a verb's module and no other.
    """
    verbs = f"{__name__.partition('.')[0]}.commands."
    if not dry_run.job.startswith(verbs):
        raise ValueError(f"no job of nanstop: {dry_run.job}")
    return cast("JobModule", import_module(dry_run.job))


def _train(
    dry_run: DryRun,
    table: Table,
    trainer_class: Any,
    _original: Any,
    trainer: Any,
    *args: Any,
    **kwargs: Any,
) -> NoReturn:
    """Stand in for ``Trainer.train``, for once.

    Whatever the job has the trainer do, it saves nothing.
    """
    table.restore(trainer_class, "train")
    save_nothing(table, trainer)

    def target() -> Target:
        from nanstop.hosts.compat import checkpoint_path
        from nanstop.hosts.trainer.facts import facts_of
        from nanstop.hosts.trainer.view import HfView

        view = HfView(trainer)
        given = args[0] if args else kwargs.get("resume_from_checkpoint")
        return Target(
            view=view,
            facts=facts_of(view, trainer, resumed=checkpoint_path(trainer, given)),
            trainer=trainer,
            # Looked up when it is called: a watch of the job's own may stand in for it then.
            train=lambda: trainer.train(*args, **kwargs),
            arguments=(args, kwargs),
        )

    _do(dry_run, target, first_rank=trainer.is_world_process_zero())


def _first_window(dry_run: DryRun) -> OpenSession:
    """Return what opens a stand-in for the session of a raw loop, which ends the process in its
    first window.
    """

    def meet(step: Any, _error: BaseException | None) -> NoReturn:
        window = None if step is None or step.obstacle() else step
        _do(dry_run, partial(_loop_target, session, window), first_rank=is_first())

    session = FirstWindow(meet)
    return session.open


def _loop_target(session: FirstWindow, step: Any) -> Target:
    """Return what a loop was about to train, its facts with what the update is about to use where
    its optimizer holds nothing of the model.

    Copies that the script feeds have gradients by then, unless it clips before it feeds them.
    """
    view, facts = session.view, session.facts
    path, optimizer = facts.gradient_path, view.optimizer
    is_fed = optimizer is None or any(p.grad is not None for p in held_by(optimizer))
    if path is not None and path.num_updated == 0 and not facts.sinks and not is_fed:
        reached = sum(p.grad is not None for p in view.root.parameters())
        facts = replace(facts, gradient_path=replace(path, num_reached=reached))
    return Target(view=view, facts=facts, step=step)


def _do(dry_run: DryRun, target: Callable[[], Target], *, first_rank: bool) -> NoReturn:
    """Write the job's answer, on the first of the ranks only, and end the process whatever
    happens.
    """
    from nanstop.hosts.script import autowatch

    if first_rank or getattr(_job(dry_run), "ON_EVERY_RANK", False):
        with autowatch.paused():
            answer = _answer(dry_run, target)
        if first_rank:
            write_whole(Path(dry_run.out), answer)
    end()


def _answer(dry_run: DryRun, target: Callable[[], Target]) -> bytes:
    try:
        return answered(result=to_json(_job(dry_run).run(target(), dry_run.options)))
    except NanstopError as error:
        return answered(error=error)
    except Exception:  # told by the process above, as a bug of nanstop
        return answered(crash=traceback.format_exc())


def end() -> NoReturn:
    """End the process.

    Neither an ``except`` nor a ``finally`` of the script may go on to save what was never trained.

    What libraries have left for the end (worker processes, temporary folders) is still tidied up.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
