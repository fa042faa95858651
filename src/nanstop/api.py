"""The public functions. ``nanstop.__init__`` imports this when one of them is first used."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.hosts.script import autowatch
from nanstop.process.inject.dry_run import current_dry_run
from nanstop.records import Diagnosis, Incident, PrecisionPlan, Report
from nanstop.report.announce import announcer
from nanstop.store.incidents import Store, load_report
from nanstop.tracebacks import passes_through
from nanstop.watches import LoopWatch, Off, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor
    from torch.optim import Optimizer

    from nanstop.commands.plan.plan import Plan
    from nanstop.session.session import Session
    from nanstop.session.telling.numbers import TrackerLog

__tracebackhide__ = passes_through
_log = logging.getLogger("nanstop")


class Callback:
    """``Trainer(..., callbacks=[nanstop.Callback()])`` is ``nanstop.watch(trainer)``.

    It is given to the trainer's constructor: one that is added later comes too late, and says so.
    ``policy`` and ``out`` as for ``watch``. ``watch``: the trainer's ``Watch``, None before.
    """

    def __init__(
        self, *, policy: Policy | str | None = None, out: str | os.PathLike[str] | None = None
    ) -> None:
        self._policy = _policy(policy)
        self._out = out
        self.watch: Watch | None = None

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Watch the trainer whose constructor calls."""
        frame = sys._getframe(1)
        while frame is not None:
            trainer = frame.f_locals.get("self")
            if _is_trainer(trainer):
                self.watch = watch(trainer, policy=self._policy, out=self._out)
                return
            frame = frame.f_back

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Say so where the trainer was made without this callback."""
        if self.watch is None:
            _log.warning(
                "nanstop: not watched: give nanstop.Callback() to the trainer's constructor, or "
                "call nanstop.watch(trainer)"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # nothing is to be done at any other event
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def watch(
    target: Any,
    optimizer: Any = None,
    *,
    policy: Policy | str | None = None,
    out: str | os.PathLike[str] | None = None,
    accumulation: int | None = None,
    plan: Plan | PrecisionPlan | str | os.PathLike[str] | None = None,
    log: TrackerLog | None = None,
) -> Watch:
    """Watch a transformers/TRL trainer (call ``trainer.train()`` as ever), or a model and its
    optimizer.

    ``plan``: a precision plan or its file, in force while a trainer trains, and on a model until
    the watch is closed. ``log``: called as ``log(numbers, step)`` once nanstop's own
    numbers have changed. ``policy``: a ``Policy`` or one of its words ("repair",
    "skip", "stop", "observe"). ``out``: incident folder, else ``$NANSTOP_DIR``, else ``.nanstop``.
    Watching a trainer twice is one watch. With ``NANSTOP=off`` nothing is watched. Errors:
    ``NanstopError`` NS001 for anything that can't be watched.
    """
    from nanstop.session.factory import incident_folder, opener, run_store, switched_off
    from nanstop.session.telling.numbers import also_logged

    chosen, opened = _policy(policy), also_logged(autowatch.opened, log)
    if _is_trainer(target):
        from nanstop.hosts.trainer.watch import watch_trainer

        if optimizer is not None:
            raise NanstopError("watch(trainer) takes no optimizer: the trainer has its own")
        job = current_dry_run()  # which stands in for the training
        if switched_off() or (job is not None and not job.keeps_watch):
            return Watch(Off(), Store(incident_folder(out)))
        known, record = vars(target).get("_nanstop_watch"), _planned(plan)
        if known is None:
            if record is not None:
                from nanstop.commands.plan.plan import require_fit

                require_fit(record, target)
            store = run_store(out)
            announce = announcer(store.folder)
            open_session = opener(chosen, store, announce, plan=record, opened=opened)
            try:
                inner = watch_trainer(target, open_session)
            except Exception as error:  # nanstop is never the reason a run dies
                from nanstop.hosts.compat import not_watched

                announce(not_watched(target, error))
                return Watch(Off(), store)
            known = target._nanstop_watch = Watch(inner, store)
        elif plan is not None:
            raise NanstopError(
                "this trainer is watched already", hint="give the plan to its first watch()"
            )
        return known
    return _watch_loop(target, optimizer, chosen, out, accumulation, _planned(plan), opened)


def _planned(plan: Plan | PrecisionPlan | str | os.PathLike[str] | None) -> PrecisionPlan | None:
    if plan is None:
        return None
    from nanstop.commands.plan.plan import record_of

    return record_of(plan)


def _watch_loop(
    model: Any,
    optimizer: Any,
    policy: Policy,
    out: str | os.PathLike[str] | None,
    accumulation: int | None,
    plan: PrecisionPlan | None,
    opened: Callable[[Session], None],
) -> LoopWatch:
    import torch

    from nanstop.hosts.loop.watch import watch_loop
    from nanstop.session.factory import incident_folder, opener, run_store, switched_off

    if not isinstance(model, torch.nn.Module):
        raise NanstopError(
            f"watch() takes a transformers or TRL trainer, or a torch module and its optimizer, "
            f"not {type(model).__name__}"
        )
    if optimizer is None:
        raise NanstopError(
            "watch(model) needs the optimizer too",
            hint="nanstop.watch(model, optimizer), or nanstop.watch(trainer)",
        )
    if switched_off():
        from nanstop.session.off import OffSession

        idle = watch_loop(model, optimizer, lambda *_: OffSession(), accumulation=accumulation)
        return LoopWatch(idle, Store(incident_folder(out)))
    applied = None
    if plan is not None:
        from nanstop.commands.plan.plan import Plan

        applied = Plan(plan).apply(model, optimizer)
    store = run_store(out)
    # A job that stands in for the training has its own way to open a loop.
    open_session = autowatch.opener() if current_dry_run() is not None else None
    if open_session is None:
        open_session = opener(policy, store, announcer(store.folder), opened=opened)
    inner = watch_loop(
        model, optimizer, open_session, accumulation=accumulation, pause=autowatch.paused
    )
    return LoopWatch(inner, store, applied, ends=policy.on_stop == "end")


def check(target: Any, *, static: bool = False) -> tuple[Diagnosis, ...]:
    """Return what will go wrong with a trainer or a model, before its first step;
    the most certain first.

    A trainer's first window is made as ``train()`` would make it, probed, and undone; with
    ``static``, and for a model alone, nothing is run. Errors: ``NanstopError`` NS001 for anything
    else. What could not be probed is no error.
    """
    from nanstop.commands.check.check import preflight
    from nanstop.commands.check.job import look
    from nanstop.report.run_report import Findings

    trainer = target if _is_trainer(target) and not static else None
    return Findings(preflight(look(_facts(target), trainer=trainer)).findings)


def _facts(target: Any) -> Any:
    import torch

    if _is_trainer(target):
        from nanstop.hosts.trainer.facts import facts_of
        from nanstop.hosts.trainer.view import HfView

        return facts_of(HfView(target), target)
    if isinstance(target, torch.nn.Module):
        from nanstop.hosts.loop.facts import facts_of_loop
        from nanstop.hosts.model.view import PlainView

        return facts_of_loop(PlainView(target))
    raise NanstopError(f"check() takes a trainer or a torch module, not {type(target).__name__}")


def plan(
    model: Any,
    batches: Any = None,
    *,
    dtype: str | torch.dtype = "float16",
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    lr: float | None = None,
    updates: int = 3,
    seconds: float = 60.0,
) -> Plan:
    """Return the smallest precision plan under which a model in ``dtype`` trains as it does in
    float32.

    ``batches``: what the model is called with (its own labels, or ``input_ids`` to predict); the
    first four are used. ``loss``: a function of one batch, else the loss that the model returns.
    ``updates`` of the optimizer, or of AdamW at ``lr`` (1e-5), are tried too. A trainer in place of
    the model brings all of these: its first window is used. The search begins no new trial after
    ``seconds``. Where there is no plan the result says why. Everything is left as it was, bit for
    bit. Synchronises the device. Errors: ``NanstopError`` NS001 for what cannot be calibrated on,
    and whatever the model raises in float32.
    """
    import torch

    from nanstop.commands.plan.plan import make_plan

    if not isinstance(model, torch.nn.Module) and not _is_trainer(model):
        raise NanstopError(f"plan() takes a torch module or a trainer, not {type(model).__name__}")
    return make_plan(
        model,
        batches,
        dtype=dtype,
        loss=loss,
        optimizer=optimizer,
        lr=lr,
        updates=updates,
        seconds=seconds,
    )


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Return a plan that was saved: its file, or the folder of the checkpoint or run that it is in.
    Errors: ``NanstopError`` for one that is missing, damaged or of another version.
    """
    from nanstop.commands.plan.plan import read_plan

    return read_plan(path)


def load(path: str | os.PathLike[str]) -> Incident:
    """Return the incident of a folder. Errors:
    ``NanstopError`` for one that is missing or damaged.
    """
    return load_report(Path(path).expanduser()).incident


def investigate(incident: Incident | str | os.PathLike[str]) -> Report:
    """Return the report of an incident or its folder, diagnosed anew by the present rules.
    Nothing is run.
    """
    from nanstop.diagnose.diagnose import diagnose_anew

    if not isinstance(incident, Incident):
        return diagnose_anew(load_report(Path(incident).expanduser()))
    return diagnose_anew(Report(incident=incident))


def _policy(given: Policy | str | None) -> Policy:
    if given is None:
        return Policy()
    if isinstance(given, str):
        return Policy(on_failure=given)  # type: ignore[arg-type]  # checked by Policy itself
    if not isinstance(given, Policy):
        raise NanstopError(f"policy must be a Policy or a word, not {type(given).__name__}")
    return given


def _is_trainer(target: Any) -> bool:
    """Return whether this is a transformers Trainer. Where nobody has imported its class, it is
    not, and that is not imported to ask.
    """
    kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return kind is not None and isinstance(target, kind)
