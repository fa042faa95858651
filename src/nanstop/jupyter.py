"""``%load_ext nanstop``: records as pages, and ``%%nanstop`` for cells that train."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanstop.hosts.script import autowatch
from nanstop.records import Diagnosis, PrecisionPlan, Report

if TYPE_CHECKING:
    from nanstop.session.session import Session

LEAST_SECONDS = 2.0
SHARE = 0.01
"""Between two pictures of a run that goes on, and the share of its time that they may take."""


def load(shell: Any) -> None:
    """Have the records of nanstop shown as pages, and add the cell magic."""
    formatter = shell.display_formatter.formatters["text/html"]
    for kind, shown in _SHOWN.items():
        formatter.for_type(kind, shown)
    shell.register_magic_function(partial(_watched, shell), "cell", "nanstop")


def unload(shell: Any) -> None:
    """Undo ``load``."""
    formatter = shell.display_formatter.formatters["text/html"]
    for kind in _SHOWN:
        with suppress(KeyError):
            formatter.pop(kind)
    shell.magics_manager.magics["cell"].pop("nanstop", None)


def _report(report: Report) -> str:
    from nanstop.report.html.notebook import report_html

    return report_html(report)


def _finding(finding: Diagnosis) -> str:
    from nanstop.report.run_report import Findings

    return Findings([finding])._repr_html_()


def _plan(plan: PrecisionPlan) -> str:
    from nanstop.commands.plan.plan import Plan

    return Plan(plan)._repr_html_()


_SHOWN: dict[type, Callable[[Any], str]] = {
    Report: _report,
    Diagnosis: _finding,
    PrecisionPlan: _plan,
}


def _watched(shell: Any, line: str, cell: str) -> None:
    """Run a cell, watched as ``nanstop run`` watches a script, and show what its trainings came to
    while they go on. What was made in cells before is watched as far as it trains in this one.

    ``line``: a word of ``Policy``, or nothing.
    """
    from nanstop.decide.policy import Policy
    from nanstop.report.announce import announcer
    from nanstop.session.factory import opener, run_store, switched_off

    if switched_off() or autowatch.opener() is not None:  # a cell inside of such a cell
        shell.run_cell(cell)
        return
    policy = Policy(on_failure=line.strip() or "repair", quiet=True)  # type: ignore[arg-type]
    store = run_store()
    announce = announcer(store.folder)
    pictures: list[_Pictures] = []
    open_session = opener(policy, store, announce, opened=autowatch.opened)
    with autowatch.told(lambda session: _follow(pictures, session)):
        autowatch.install(open_session)
        try:
            shell.run_cell(cell)
        finally:
            autowatch.unwatch()
            for one in pictures:
                one.show()


def _follow(pictures: list[_Pictures], session: Session) -> None:
    if all(one.session is not session for one in pictures):
        pictures.append(_Pictures(session))


class _Pictures:
    """One run in the cell's output, drawn anew while it goes on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._before, session.beat = session.beat, self._beat
        shown = import_module("IPython.display")
        self._handle = shown.display(session.report(), display_id=True)
        self._due = time.monotonic() + LEAST_SECONDS

    def show(self) -> None:
        """Draw the run as it stands."""
        self._handle.update(self.session.report())

    def _beat(self, step: int | None) -> None:
        self._before(step)
        began = time.monotonic()
        if step is None or began < self._due:
            return
        with suppress(Exception):  # a picture is never the reason a run dies
            self.show()
        now = time.monotonic()
        self._due = now + max(LEAST_SECONDS, (now - began) / SHARE)
