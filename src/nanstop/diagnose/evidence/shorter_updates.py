"""Updates that led to a failure and were made anew, shorter."""

from __future__ import annotations

from nanstop.records import Atom, Evidence, RunFacts, Trial

_SHORTER = ("unscale", "lr", "weight_decay", "clip")


def _trials(evidence: Evidence) -> tuple[Trial, ...]:
    """Return the trials in which the updates that led to a failure were made anew, shorter: none
    where the update itself failed.
    """
    found = evidence.localization
    if found is None or found.key.phase == "optimizer":
        return ()
    changed = (trial for trial in evidence.trials if trial.atoms)
    return tuple(one for one in changed if all(atom.remedy in _SHORTER for atom in one.atoms))


def passing(evidence: Evidence) -> Trial | None:
    """Return the trial that shorter updates do not lead to the failure; None where none was made,
    or they do.
    """
    return next((one for one in _trials(evidence) if one.outcome == "pass"), None)


def passing_unscaled(evidence: Evidence, facts: RunFacts) -> Trial | None:
    """Return the trial that gradients without their scale do not lead to the failure (NS112); None
    where there is none.
    """
    shorter = passing(evidence)
    return shorter if shorter is not None and shorter.atoms == (without_scale(facts),) else None


def was_tried(evidence: Evidence, remedy: str) -> bool:
    """Return whether updates could be made anew under a remedy alone."""
    mine = (one for one in _trials(evidence) if {atom.remedy for atom in one.atoms} == {remedy})
    return any(one.outcome != "not_applicable" for one in mine)


def made_anew(trial: Trial) -> str:
    """Return what a passing trial has shown."""
    return f"made anew with the cure below, {trial.message}"


def are_refuted(evidence: Evidence) -> bool:
    """Return whether shorter updates lead to the failure, too: their length is not its cause."""
    trials = _trials(evidence)
    return bool(trials) and all(one.outcome == "same_failure" for one in trials)


def applied_scale(facts: RunFacts) -> float | None:
    """Return the scale of a loss whose gradients an optimizer takes as they are; None for none."""
    is_applied = facts.scaler not in (None, 0.0, 1.0) and "update" in facts.sinks
    return facts.scaler if is_applied else None


def without_scale(facts: RunFacts) -> Atom | None:
    """Return what takes the number off the gradients that the loop has multiplied its loss by, or a
    scaler that its updates pass by; None where none has, or updates do not depend on it.
    """
    optimizer, factor = facts.optimizer, applied_scale(facts) or facts.loss_factor
    if optimizer is None or optimizer.per_rate is not None or not factor or factor < 1.0:
        return None
    return Atom(remedy="unscale", value=f"{factor:g}")
