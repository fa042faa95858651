"""The job of ``nanstop doctor``: failures planted in the training that a script asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanstop.commands.doctor.doctor import Audit
from nanstop.errors import NanstopError
from nanstop.hosts import compat
from nanstop.hosts.patch_table import Table
from nanstop.process.inject.dry_run import DryRun
from nanstop.process.inject.dry_run_child import Target


def run(target: Target, _options: Mapping[str, Any]) -> Audit:
    """Return the trials of a trainer.

    Errors: ``NanstopError`` where it does not train by itself.
    """
    from nanstop.commands.doctor.on_trainer import TrainerAudit

    if target.trainer is None:
        raise NanstopError("this job audits trainers; a loop is audited while it runs")
    if compat.world_size(target.trainer) > 1:
        raise NanstopError(
            "the guards are audited in one process: start the script without a launcher"
        )
    return TrainerAudit(target.trainer).run()


def open_loop(dry_run: DryRun, table: Table) -> None:
    """Audit the loop that the script runs.

    It goes on by itself, and no session is opened for it.
    """
    from nanstop.commands.doctor import on_loop

    on_loop.install(table, dry_run)
