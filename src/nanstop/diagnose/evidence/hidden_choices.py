"""Choices that the program hides by an infinity, and that a result is made of all the same."""

from __future__ import annotations

from nanstop.records import Evidence, OpEvent, op_name

_CAUSES = {
    "row": "where all is hidden, nothing is left to choose",
    "chosen": "what is hidden has the probability 0, and its logarithm is -Inf",
    "counted": "the log-probability of what is hidden is -Inf, and a sum of all of them counts it",
}
_ADVICE = {
    "row": "give each row something that is not hidden, or leave such rows out of the loss: "
    "`loss[allowed.any(-1)].mean()`",
    "chosen": "the choice or the mask is wrong there; a label that is to be left out is usually "
    "-100",
    "counted": "where all choices are summed, as in label smoothing, it is usually over what is "
    "allowed, `logp.masked_fill(hidden, 0).sum(-1) / allowed.sum(-1)`, or not at all",
}


def hidden_title(evidence: Evidence, event: OpEvent) -> str:
    """Return what an operation makes of what is hidden, as the title of a finding; "" without."""
    op = op_name(event.op)
    titles = {
        "row": f"`{op}` of a row that is hidden in full",
        "chosen": f"`{op}` picks what is hidden",
        "counted": f"`{op}` counts what is hidden",
    }
    return titles.get(_hidden(evidence), "")


def hidden_cause(evidence: Evidence) -> str:
    """Return why that is not finite, or ""."""
    return _CAUSES.get(_hidden(evidence), "")


def hidden_advice(evidence: Evidence) -> str:
    """Return what people do where something hidden is chosen or counted, or ""."""
    return _ADVICE.get(_hidden(evidence), "")


def _hidden(evidence: Evidence) -> str:
    found = evidence.localization
    return found.hidden if found is not None else ""
