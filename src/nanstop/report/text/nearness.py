"""How well a cure did, in brackets behind it."""

from __future__ import annotations

from nanstop.decide.policy import DATA_REMEDIES
from nanstop.records import Alternative, Proof, Reference, Trial
from nanstop.records.line_forms import NUMBERED
from nanstop.records.remedies import makes_rows
from nanstop.wording import counted

_NEAR = 1e-2
"""How far the loss of a cure and the direction of its gradients are from exact ones at most, where
they are told as near.
"""


def exact_fails(proof: Proof) -> bool:
    """Return whether the exact run itself fails: then what a proof ends with is what was seen."""
    exact = proof.reference
    return exact is not None and bool(exact.fails_in) and not exact.still_in


def proof_in_brackets(proof: Proof) -> str:
    """Return the verdict with its counts: passes, ablations, distance to float32, cost."""
    removed = proof.ablations or ((proof.baseline,) if proof.baseline is not None else ())
    part = "it" if len(proof.minimal) == 1 else "any part of it"
    said = "isolated, not cured" if proof.verdict == "isolated" else proof.verdict
    clauses = [f"{said}: with it {_share(proof.passing, passed=True)} runs pass"]
    if removed:
        clauses[0] += f", without {part} {_share(removed, passed=False)} fail"
    near, following = _nearness(proof), proof.next_experiment
    following = following if proof.verdict == "plausible" else ""
    clauses += ["" if near and following.startswith(near) else near, following]
    clauses.append(_short_of_memory(proof))
    clauses.append("changes training" if proof.safety == "changes_training" else "")
    clauses.append(proof.cost)
    return f"[{'; '.join(clause for clause in clauses if clause)}]"


def _short_of_memory(proof: Proof) -> str:
    """Return what of the model was run exactly where there was no room for all of it, or ""."""
    region = proof.scope.removeprefix("region ")
    if region != proof.scope:
        return f"`{region}` alone was run in {_exact(proof.reference)}, for want of memory"
    if proof.scope == "operation":
        return "nothing but the failing operation was computed exactly, for want of memory"
    by_parts = proof.scope == "layer by layer"
    return f"{_exact(proof.reference)}, layer by layer for want of memory" if by_parts else ""


def _share(trials: tuple[Trial, ...], *, passed: bool) -> str:
    return f"{sum((trial.outcome == 'pass') == passed for trial in trials)} of {len(trials)}"


def _nearness(proof: Proof) -> str:
    if proof.is_of_updates:
        return ""
    gaps = [abs(trial.loss_gap) for trial in proof.passing if trial.loss_gap is not None]
    if proof.reference is not None and proof.reference.outcome == "oom":
        return ""
    if proof.reference is not None and proof.reference.outcome != "pass":
        unchanged = [trial.rows_unchanged for trial in proof.passing]
        known = [one for one in unchanged if one is not None]
        kept = known and all(known)
        return _kept(proof) if kept else f"{proof.reference.widest} fails too"
    if not gaps:
        return ""
    cosines = [trial.grad_cosine for trial in proof.passing if trial.grad_cosine is not None]
    cosine = min(cosines, default=None)
    if not _is_near(max(gaps), cosine, proof.reference):
        return _differs(proof)
    turned = cosine is None or 1.0 - cosine > _NEAR  # as healthy ones are, of gradients near 0
    near = _within(max(gaps), _exact(proof.reference)) + (
        "" if turned else f", gradients in the same direction (cosine {cosine:.5f})"
    )
    shared = proof.reference.num_choices if proof.reference is not None else 0
    return near + (f", with {counted(shared, 'choice')} as in the run" if shared else "")


def _is_near(gap: float, cosine: float | None, reference: Reference | None) -> bool:
    loss, turned = _NEAR, _NEAR
    if reference is not None:
        loss, turned = max(loss, reference.loss_tolerance), max(turned, reference.cosine_tolerance)
    return gap <= loss and (cosine is None or 1.0 - cosine <= turned)


def _differs(proof: Proof) -> str:
    """Return what is said of a cure that is not near exact numbers: what leaves samples out is not
    meant to be.
    """
    kept = any(trial.rows_unchanged for trial in proof.passing)
    if kept or proof.verdict == "isolated":
        return _kept(proof) if kept else ""
    return f"other numbers than in {_exact(proof.reference)}"


def _kept(proof: Proof) -> str:
    if any(atom.remedy in NUMBERED for atom in proof.minimal):
        return "the same with another number"
    if makes_rows(proof.minimal):
        return "no other output of healthy rows changed"
    return "healthy rows unchanged"


def _exact(reference: Reference | None) -> str:
    return reference.dtype if reference is not None else "float32"


def _within(gap: float, exact: str) -> str:
    if gap == 0.0:
        return f"loss equal to {exact}"
    mantissa, _, exponent = f"{gap:.0e}".partition("e")
    return f"loss within {mantissa}e{int(exponent)} of {exact}"


def alternative_in_brackets(other: Alternative, reference: Reference | None) -> str:
    """Return how another cure that passes did."""
    changes = "; changes training" if other.safety == "changes_training" else ""
    gap = None if other.loss_gap is None else abs(other.loss_gap)
    near = ""
    if gap is not None and _is_near(gap, other.grad_cosine, reference):
        near = f"; {_within(gap, _exact(reference))}"
    elif gap is not None and not _leaves_out(other) and not _is_failing(reference):
        near = f"; other numbers than in {_exact(reference)}"
    return f"[{other.passed} of {other.runs} runs pass{near}{changes}]"


def _leaves_out(other: Alternative) -> bool:
    return any(atom.remedy in DATA_REMEDIES for atom in other.atoms)


def _is_failing(reference: Reference | None) -> bool:
    return reference is None or reference.outcome != "pass"
