"""Losses that are means: of none 0, as the sum over a number that is kept from 0."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from nanstop.records.vocabulary import LOSSES_OF_ELEMENTS
from nanstop.rewrite.draft import Draft
from nanstop.rewrite.operations import Operation


def _cross_entropy(draft: Draft, found: Operation) -> str | None:
    """Return the sum over the number of labels, at least 1, or over the weights of their classes,
    more than 0.
    """
    if len(found.args) != 2 or set(found.keywords) - {"weight", "ignore_index", "label_smoothing"}:
        return None
    given = found.keywords.get("ignore_index")
    ignored = draft.source.segment(given) if given is not None else "-100"
    target = draft.twice(found.args[1], "labels")
    node = found.node
    assert isinstance(node, ast.Call)
    plain = found.made_by is None
    function = draft.source.segment(node.func) if plain else draft.functional(found.name)
    rest = [f"{key}={draft.source.segment(one)}" for key, one in found.keywords.items()]
    weight = None
    if "weight" in found.keywords:
        weight = _weight(draft, found, node.func)
        rest = [f"weight={weight}" if one.startswith("weight=") else one for one in rest]
    inside = (draft.source.segment(found.operand), target, *rest, 'reduction="sum"')
    summed = f"{function}({', '.join(inside)})"
    if weight is None:
        return f"{summed} / ({target} != {ignored}).sum().clamp(min=1)"
    of_labels = f"{weight}[{target}[{target} != {ignored}]]"
    return f"{summed} / {of_labels}.sum().clamp(min={draft.tiny(weight)})"


def _weight(draft: Draft, found: Operation, called: ast.expr) -> str:
    """Return the weights of the classes where they are to be had: a module holds its own."""
    if found.made_by is None or called is found.made_by:
        return draft.twice(found.keywords["weight"], "weight")
    return f"{draft.source.segment(called)}.weight"


def _of_elements(draft: Draft, found: Operation) -> str | None:
    """Return the sum over the number of elements, at least 1."""
    if len(found.args) != 2 or found.keywords or not isinstance(found.node, ast.Call):
        return None
    read, func = draft.twice(found.operand, "chosen"), found.node.func
    name = draft.functional(found.name) if found.made_by else draft.source.segment(func)
    both = f"{read}, {draft.source.segment(found.args[1])}"
    return f'{name}({both}, reduction="sum") / max({read}.numel(), 1)'


def _ctc(draft: Draft, found: Operation) -> str | None:
    """Return the call with ``zero_infinity``."""
    node = found.made_by or found.node
    assert isinstance(node, ast.Call)
    given = next((one for one in node.keywords if one.arg == "zero_infinity"), None)
    text = draft.source.segment(found.node)
    if found.made_by is not None:
        from nanstop.rewrite.arguments import with_keyword

        draft.edits += with_keyword(draft.source, node, "zero_infinity", "True")
        return text
    if given is not None:
        return None
    return f"{text[:-1].rstrip().rstrip(',')}, zero_infinity=True)"


def _divergence(draft: Draft, found: Operation) -> str | None:
    """Return a divergence from targets above 0."""
    if len(found.args) < 2 or "log_target" in found.keywords:
        return None
    target = draft.source.operand(found.args[1])
    return draft.with_operand(found, 1, f"{target}.clamp(min={draft.tiny(target)})")


LOSSES: Mapping[str, Callable[[Draft, Operation], str | None]] = {
    **dict.fromkeys(("cross_entropy", "nll_loss"), _cross_entropy),
    **dict.fromkeys(LOSSES_OF_ELEMENTS, _of_elements),
    "ctc_loss": _ctc,
    "kl_div": _divergence,
}
