"""The same function computed from logarithms: log of softmax as log_softmax, and its relatives.

Equal wherever the old form is finite, up to rounding.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping

from nanstop.rewrite.draft import Draft, NotKnownError
from nanstop.rewrite.forms.log_of import (
    both_exponents,
    closed,
    log_of,
    log_of_rest,
    one_plus_exp,
    rest_of,
)
from nanstop.rewrite.operations import Operation, number_of, same
from nanstop.rewrite.source import expressions_of

_BASES = {"log2": math.log(2), "log10": math.log(10)}


def rewrite_in_log_space(draft: Draft) -> bool:
    """Return whether something of the statement could be rewritten; the draft holds it."""
    done = False
    pending = list(expressions_of(draft.statement))
    while pending:
        node = pending.pop(0)
        text = _stable(draft, node)
        if text is None:
            pending += [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
            inside = ast.iter_child_nodes(node)
            pending += [one.value for one in inside if isinstance(one, ast.keyword)]
        else:
            draft.replaced(node, text)
            done = True
    return done


def _stable(draft: Draft, node: ast.expr) -> str | None:
    """Return a stable form of an expression as text; None where it has none that is known."""
    found = None if isinstance(node, ast.Name) else draft.operation(node)
    made = _FORMS.get(found.name) if found is not None else None
    if found is None or made is None:
        return None
    kept = len(draft.edits)
    try:
        text = made(draft, found)
    except NotKnownError:
        text = None
    if text is None:
        del draft.edits[kept:]
    return text


def _log(draft: Draft, found: Operation) -> str | None:
    return log_of(draft, found.operand) if len(found.args) == 1 and not found.keywords else None


def _other_log(draft: Draft, found: Operation) -> str | None:
    inner = _log(draft, found)
    return f"{closed(inner)} / {_BASES[found.name]!r}" if inner is not None else None


def _times_log(draft: Draft, found: Operation) -> str | None:
    """Of ``xlogy``, and of ``entr``, which is minus that of a number and itself."""
    log = log_of(draft, found.args[-1])
    text = f"{draft.closed(found.args[0])} * {closed(log)}" if log is not None else None
    return f"-({text})" if text is not None and found.name == "entr" else text


def _log1p(draft: Draft, found: Operation) -> str | None:
    inner = draft.operation(found.operand)
    if inner is not None and inner.name == "exp":
        return f"{draft.functional('softplus')}({draft.text(inner.operand)})"
    under = draft.operation(inner.operand) if inner is not None and inner.name == "neg" else None
    if under is not None and under.name == "sigmoid":
        return f"{draft.functional('logsigmoid')}(-{draft.closed(under.operand)})"
    return log_of_rest(draft, under.operand) if under is not None and under.name == "exp" else None


def _divided(draft: Draft, found: Operation) -> str | None:
    """Quotients of exponentials: ``exp(a - b)``, softmax, sigmoid."""
    if len(found.args) != 2 or found.keywords:
        return None
    above, below = (draft.operation(one) for one in found.args)
    if above is not None and above.name == "exp" and below is not None:
        return _of_exponentials(draft, above, below)
    if above is not None and above.name == "mul" and below is not None:
        return _weighted(draft, above, below)
    if number_of(found.operand) == 1.0 and below is not None:
        power = one_plus_exp(draft, below)
        under = draft.operation(power) if power is not None else None
        if power is not None and under is not None and under.name == "neg":
            return f"{draft.torch('sigmoid')}({draft.text(under.operand)})"
        if power is not None:
            return f"{draft.torch('sigmoid')}(-{draft.closed(power)})"
    return None


def _weighted(draft: Draft, above: Operation, below: Operation) -> str | None:
    """Quotient of what is multiplied with an exponential."""
    for factor, other in (above.args, above.args[::-1]):
        inner = draft.operation(other)
        share = _of_exponentials(draft, inner, below) if inner and inner.name == "exp" else None
        if share is not None:
            return f"{draft.closed(factor)} * {share}"
    return None


def _of_exponentials(draft: Draft, above: Operation, below: Operation) -> str | None:
    exponent = above.operand
    if below.name == "exp":
        return f"{draft.torch('exp')}({draft.text(exponent)} - {draft.closed(below.operand)})"
    power = one_plus_exp(draft, below)
    if power is not None and same(power, exponent):
        return f"{draft.torch('sigmoid')}({draft.text(exponent)})"
    both = both_exponents(draft, below)
    others = [one for one in both or () if not same(one, exponent)]
    if len(others) == 1:
        text = f"{draft.text(exponent)} - {draft.closed(others[0])}"
        return f"{draft.torch('sigmoid')}({text})"
    if below.name != "sum":
        return None
    summed, dim = draft.operation(below.operand), below.argument(1, "dim")
    keeps = below.argument(2, "keepdim")
    kept = isinstance(keeps, ast.Constant) and keeps.value is True
    one_dim = number_of(dim) is not None or isinstance(dim, ast.Name)
    if summed is None or summed.name != "exp" or not (kept and one_dim):
        return None
    if not same(summed.operand, exponent) or dim is None:
        return None
    return f"{draft.torch('softmax')}({draft.text(exponent)}, dim={draft.text(dim)})"


def _binary_cross_entropy(draft: Draft, found: Operation) -> str | None:
    """From the numbers before the sigmoid."""
    inner = draft.operation(found.operand)
    if inner is None or inner.name != "sigmoid" or (found.made_by and found.made_by.args):
        return None
    rest = rest_of(draft, found)
    function = draft.functional("binary_cross_entropy_with_logits")
    return f"{function}({', '.join((draft.text(inner.operand), *rest))})"


_FORMS: Mapping[str, Callable[[Draft, Operation], str | None]] = {
    "log": _log,
    "log2": _other_log,
    "log10": _other_log,
    "log1p": _log1p,
    "div": _divided,
    "binary_cross_entropy": _binary_cross_entropy,
    "entr": _times_log,
    "xlogy": _times_log,
}
