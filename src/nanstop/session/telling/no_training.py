"""The incident of a run whose updates change nothing."""

from __future__ import annotations

from dataclasses import replace

from nanstop.decide.policy import for_nothing_trained
from nanstop.decide.remembered import PolicyState
from nanstop.records import AuditEntry, Diagnosis, FailureKey, Signal, StepId
from nanstop.session.failing.investigation import Investigation
from nanstop.session.run_state import RunState
from nanstop.session.shared.conclusion import Conclusion


def of_no_training(run: RunState, cause: Diagnosis) -> Conclusion:
    """Return what a run comes to whose updates change nothing, by a ``cause`` that is found
    now: an incident of finite numbers, of which nothing is run again.
    Synchronises the device as its numbers are read.
    """
    assert cause.seen is not None
    now = run.present() or StepId(run=run.facts.host, step=0)
    at = replace(now, step=cause.seen.step, micro=None)
    found = Investigation(
        facts=run.facts,
        at=at,
        phase=cause.seen.phase or "optimizer",
        signals=(Signal(source="gauge", message=cause.title, at=at),),
        live=run.live,
    )
    found.state(cause, run.series)
    action = for_nothing_trained(run.policy)
    outcome = "done" if action.kind == "stop" else ""
    return Conclusion(
        report=found.report(AuditEntry(at=at, action=action, outcome=outcome)),
        key=FailureKey(kind="zero_grad", phase=found.phase),
        state=PolicyState(),
        is_new=True,
    )
