"""A finding's planted fault and its healthy twin from the zoo, trained for real under a watch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanstop.decide.policy import Policy
from nanstop.diagnose.diagnose import examine
from nanstop.faults.specimen import Specimen
from nanstop.faults.table import ZOO
from nanstop.hosts.loop.watch import watch_loop
from nanstop.measure.probe import probe
from nanstop.records import Diagnosis, Evidence, Report
from nanstop.replay.step import Step
from nanstop.report.text.terminal import render, render_finding
from nanstop.session.factory import opener
from nanstop.session.first_window import first_window
from nanstop.session.watched_run import OpenSession
from nanstop.store.incidents import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """What a watched run of a specimen showed.

    ``ended``: the error that ended it early, or an empty string.
    """

    losses: tuple[float, ...]
    reports: tuple[Report, ...]
    findings: tuple[Diagnosis, ...]
    ended: str

    @property
    def codes(self) -> tuple[str, ...]:
        """Return every code that was named, each once."""
        named = (one.code for report in self.reports for one in report.diagnoses)
        return tuple(dict.fromkeys([*named, *(one.code for one in self.findings)]))

    @property
    def text(self) -> str:
        """Return the losses and what nanstop said of them."""
        losses = ", ".join(f"{loss:.4g}" for loss in self.losses[:8])
        said = [render(one) for one in self.reports] + [
            render_finding(one) for one in self.findings
        ]
        return "\n".join([f"losses: {losses or self.ended}", *(said or ["nothing found"])])


def exhibits(code: str) -> tuple[Exhibit, Exhibit]:
    """Return what the planted fault of ``code`` shows, and what its healthy twin does.

    Trains both; writes nothing.
    """
    entry = ZOO[code]
    return _shown(entry.fault), _shown(entry.healthy)


def probed(specimen: Specimen) -> tuple[Diagnosis, ...]:
    """Return what a probe of the specimen's first window finds. The specimen is not trained."""

    def found(step: Step) -> tuple[Diagnosis, ...]:
        return examine(Evidence(facts=step.facts, probe=probe(step)), "gauge").diagnoses

    def train(open_session: OpenSession) -> None:
        with watch_loop(specimen.model, specimen.optimizer, open_session) as watch:
            watch.step(specimen.loss_fn, specimen.batches[0])
            watch.update(clip=None, scaler=specimen.scaler)

    return first_window(found, train)


def _shown(build: Callable[[], Specimen]) -> Exhibit:
    shown = _watched(build())
    if shown.ended:
        return shown
    new = [one for one in probed(build()) if one.code not in shown.codes]
    return replace(shown, findings=(*shown.findings, *new))


def _watched(specimen: Specimen) -> Exhibit:
    losses: list[float] = []
    ended = ""
    with tempfile.TemporaryDirectory(prefix="nanstop-") as folder:
        open_session = opener(Policy(), Store(folder), announce=lambda _: None)
        watch = watch_loop(specimen.model, specimen.optimizer, open_session)
        try:
            with watch:
                for batch in specimen.batches:
                    losses.append(watch.step(specimen.loss_fn, batch).item())
                    watch.update(clip=None, scaler=specimen.scaler)
        except Exception as error:  # some faults are exceptions, and some end the run
            ended = f"{type(error).__name__}: {error}"
        session = watch.session
    return Exhibit(
        losses=tuple(losses),
        reports=tuple(session.reports) if session else (),
        findings=tuple(session.findings) if session else (),
        ended=ended,
    )
