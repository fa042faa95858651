"""The logarithm of an expression, as text, without the number whose logarithm it is: that of a
softmax is a log_softmax, that of a product a sum.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from nanstop.rewrite.draft import Draft, NotKnownError
from nanstop.rewrite.forms.logarithms import (
    log_cosh,
    log_erfc,
    log_expm1,
    log_floored,
    log_i0,
    log_softplus,
    log_tail,
)
from nanstop.rewrite.operations import CHEAP, Operation, constant_of, is_size, number_of, same
from nanstop.rewrite.source import is_closed, parsed

_VANISHES = {"float16": 2.0**-25, "bfloat16": 2.0**-134}
"""Numbers up to this are 0 in the format."""
_HALVES = "0.693"
"""Where either half of log(1 - exp(-x)) has lost one bit: log(2)."""
_SELECTS = CHEAP | {"gather", "index_select", "masked_select", "float", "clone"}
_SELECTS |= {"diag", "diagonal", "flip", "t"}
_TURNED = ("T", "mT")


def log_of(draft: Draft, node: ast.expr) -> str | None:
    """Return the logarithm of an expression without the detour that loses it; None where none is
    known.
    """
    carried = draft.log_of_variable(node.id) if isinstance(node, ast.Name) else None
    if carried is not None:
        return carried
    meant = draft.meant(node)
    assert isinstance(meant, ast.expr)
    selected = _selected(draft, meant)
    if selected is not None:
        return selected
    found = draft.operation(meant)
    made = _LOGS.get(found.name) if found is not None else None
    return made(draft, found) if found is not None and made is not None else None


def _selected(draft: Draft, node: ast.expr) -> str | None:
    """Return the logarithm of what is picked out of a tensor: picked out of the logarithm."""
    if isinstance(node, ast.Subscript):
        inner = log_of(draft, node.value)
        return _after(draft, node, node.value, inner)
    if isinstance(node, ast.Attribute) and node.attr in _TURNED:
        return _after(draft, node, node.value, log_of(draft, node.value))
    func = node.func if isinstance(node, ast.Call) else None
    if not isinstance(func, ast.Attribute) or draft.source.qualified(func):
        return None
    picks = func.attr in _SELECTS
    return _after(draft, node, func.value, log_of(draft, func.value)) if picks else None


def _after(draft: Draft, node: ast.expr, value: ast.expr, inner: str | None) -> str | None:
    if inner is None:
        return None
    _, end = draft.source.span(node)
    tail = draft.source.text[draft.source.span(value)[1] : end]
    return f"{closed(inner)}{tail.lstrip(')') if tail.startswith(')') else tail}"


def closed(text: str) -> str:
    """Return an expression so that a method or an operator may follow it."""
    return text if is_closed(parsed(text)) else f"({text})"


def _log_softmax(draft: Draft, found: Operation) -> str:
    """Spelled as the softmax is: as a method, or with the same prefix where it has one."""
    node, rest = found.node, rest_of(draft, found)
    assert isinstance(node, ast.Call)
    if found.is_method:
        return f"{draft.closed(found.operand)}.log_softmax({', '.join(rest)})"
    prefix = draft.source.qualified(node.func).rpartition(".")[0]
    is_prefixed = found.made_by is None and isinstance(node.func, ast.Attribute)
    if is_prefixed and prefix in ("torch", "torch.nn.functional"):
        function = f"{draft.source.segment(node.func).rpartition('.')[0]}.log_softmax"
    else:
        function = draft.functional("log_softmax")
    return f"{function}({', '.join((draft.text(found.operand), *rest))})"


def rest_of(draft: Draft, found: Operation) -> list[str]:
    """Return all arguments but the operand, as text."""
    rest = [draft.text(one) for one in found.args[1:]]
    return rest + [f"{key}={draft.text(one)}" for key, one in found.keywords.items()]


def _log_sigmoid(draft: Draft, found: Operation) -> str:
    return f"{draft.functional('logsigmoid')}({draft.text(found.operand)})"


def _log_exp(draft: Draft, found: Operation) -> str:
    return draft.text(found.operand)


def _log_sum(draft: Draft, found: Operation) -> str | None:
    """Log of a sum of exponentials, or of probabilities."""
    inner = log_of(draft, found.operand)
    if inner is None or set(found.keywords) - {"dim", "keepdim"}:
        return None
    rest = rest_of(draft, found)
    if found.argument(1, "dim") is None:
        return f"{draft.torch('logsumexp')}({closed(inner)}.flatten(), 0)"
    return f"{draft.torch('logsumexp')}({', '.join((inner, *rest))})"


def _log_mean(draft: Draft, found: Operation) -> str | None:
    """Log of a mean of exponentials: that of their sum less that of how many they are."""
    inner, dim = log_of(draft, found.operand), found.argument(1, "dim")
    is_plain = not set(found.keywords) - {"dim", "keepdim"}
    if inner is None or not is_plain or (dim is not None and number_of(dim) is None):
        return None
    if not inner.isidentifier():
        inner = draft.named(inner, "logs", found.operand)
    count = f"{inner}.numel()" if dim is None else f"{inner}.shape[{draft.text(dim)}]"
    log = draft.source.spelled("math.log")
    less = f"{log}({count})" if log else f"{draft.torch('tensor')}(float({count})).log()"
    given = (f"{inner}.flatten()", "0") if dim is None else (inner, *rest_of(draft, found))
    return f"{draft.torch('logsumexp')}({', '.join(given)}) - {less}"


def _log_running_sum(draft: Draft, found: Operation) -> str | None:
    inner = log_of(draft, found.operand)
    if inner is None or set(found.keywords) - {"dim"}:
        return None
    return f"{draft.torch('logcumsumexp')}({', '.join((inner, *rest_of(draft, found)))})"


def _log_product(draft: Draft, found: Operation) -> str | None:
    """Log of ``p.prod(...)``: the sum of the logarithms."""
    inner = log_of(draft, found.operand)
    if set(found.keywords) - {"dim", "keepdim"}:
        return None
    rest = rest_of(draft, found)
    known = inner if inner is not None else f"{draft.torch('log')}({draft.text(found.operand)})"
    return f"{closed(known)}.sum({', '.join(rest)})"


def _log_of_both(sign: str) -> Callable[[Draft, Operation], str | None]:
    def made(draft: Draft, found: Operation) -> str | None:
        numbers = [constant_of(draft.source, one) for one in found.args]
        if len(numbers) != 2 or found.keywords or None not in numbers:
            return None
        if any(number is not None and number <= 0 for number in numbers):
            return None
        parts = [
            log_of(draft, one) if number is None else _log_of_number(number)
            for one, number in zip(found.args, numbers, strict=True)
        ]
        if parts.count(None) == 1 and numbers == [None, None]:
            place = parts.index(None)  # of what is negative it is NaN, and not shown
            parts[place] = log_as_it_is(draft, found.args[place])
        first, second = parts
        return None if first is None or second is None else _joined(first, sign, second)

    return made


def _log_of_matmul(draft: Draft, found: Operation) -> str | None:
    """Log of a matrix times a vector, or a matrix: each element is a sum of products."""
    logs = [log_of(draft, one) for one in found.args]
    if len(logs) != 2 or found.keywords or not any(logs):
        return None
    left, right = (
        log or f"{draft.torch('log')}({draft.text(one)})"
        for log, one in zip(logs, found.args, strict=True)
    )
    left, dim = (f"{closed(left)}.unsqueeze(-1)", -2) if draft.of_matrices else (left, -1)
    return f"{draft.torch('logsumexp')}({left} + {right}, {dim})"


def log_as_it_is(draft: Draft, node: ast.expr) -> str:
    """Return the logarithm of what has no other form: of a size by Python's. Errors:
    ``NotKnownError`` for a number that has none.
    """
    number = constant_of(draft.source, node)
    if number is not None and number > 0:
        return repr(math.log(number))
    if number is not None:
        raise NotKnownError
    leaves = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    sizes = [one for one in ast.walk(node) if is_size(one)]
    text, log = draft.text(node), draft.source.spelled("math.log")
    is_number = bool(sizes) and len(leaves) == len(sizes)
    if is_number and log is None:
        return f"{draft.torch('tensor')}(float({text})).log()"
    return f"{log if is_number else draft.torch('log')}({text})"


def _log_of_number(number: float) -> str:
    return repr(math.log(number)) if number != 1.0 else ""


def _joined(first: str, sign: str, second: str) -> str:
    """Return a sum or difference of two texts, of which "" is 0."""
    if not second:
        return first
    if not first:
        return second if sign == "+" else f"-{closed(second)}"
    if number_of(parsed(second)) is None:
        return f"{first} {sign} {closed(second) if sign == '-' else second}"
    is_taken = (sign == "-") != second.startswith("-")
    return f"{first} {'-' if is_taken else '+'} {second.removeprefix('-')}"


def _log_quotient(draft: Draft, found: Operation) -> str | None:
    """Log of ``1 / (1 + exp(x))``, and of any other quotient."""
    below = draft.operation(found.args[1]) if len(found.args) == 2 else None
    power = one_plus_exp(draft, below) if below is not None else None
    if power is None or number_of(found.operand) != 1.0 or found.keywords:
        return _log_of_both("-")(draft, found)
    inner = draft.operation(power)
    is_turned = inner is not None and inner.name == "neg"
    text = draft.text(inner.operand) if inner and is_turned else f"-{draft.closed(power)}"
    return f"{draft.functional('logsigmoid')}({text})"


def _log_power(draft: Draft, found: Operation) -> str | None:
    inner = log_of(draft, found.operand)
    exponent = found.argument(1, "exponent")
    if inner is None or exponent is None or found.keywords:
        return None
    power = draft.text(exponent) if number_of(exponent) is not None else draft.closed(exponent)
    return f"{power} * {closed(inner)}"


def _log_added(draft: Draft, found: Operation) -> str | None:
    """Log of ``1 + exp(x)``, of two exponentials, or of a probability plus a number that its format
    rounds to 0.
    """
    first, second = found.args
    both = both_exponents(draft, found)
    if both is not None:
        return f"{draft.torch('logaddexp')}({', '.join(map(draft.text, both))})"
    for one, other in ((first, second), (second, first)):
        number = number_of(one)
        inner = draft.operation(other)
        if number == 1.0 and inner is not None and inner.name == "exp":
            return f"{draft.functional('softplus')}({draft.text(inner.operand)})"
        if number == 1.0 and inner is not None and inner.name == "erf":
            return log_tail(draft, inner)
        if number is not None and 0 <= number <= _VANISHES.get(draft.dtype, 0.0):
            return log_of(draft, other)
        log = log_of(draft, other) if number is not None and number > 0 else None
        if number is not None and log is not None and "sumexp(" in log:
            return log_floored(draft, closed(log), number)
    return None


def _log_taken_away(draft: Draft, found: Operation) -> str | None:
    """Log of ``1 - sigmoid(x)``, of ``1 - exp(x)``, and of ``1 - tanh(x) ** 2``."""
    inner = draft.operation(found.args[1])
    if number_of(found.operand) != 1.0:
        return None
    others = _log_of_others(draft, found.args[1])
    if others is not None or inner is None:
        return others
    root = _root_of(draft, inner)
    if root is not None and root.name == "tanh":
        x = draft.again(root.operand, "squashed")
        softplus = draft.functional("softplus")
        return f"2 * ({math.log(2)!r} - {x} - {softplus}(-2 * {x}))"
    if inner.name == "erf":
        return log_tail(draft, inner, "-")
    if inner.name == "sigmoid":
        return f"{draft.functional('logsigmoid')}(-{draft.closed(inner.operand)})"
    return log_of_rest(draft, inner.operand) if inner.name == "exp" else None


def _log_of_others(draft: Draft, node: ast.expr) -> str | None:
    """Log of 1 less the gathered elements of a softmax: the share of all others. 1 - p has no
    digits left where p is nearly 1.
    """
    meant = draft.meant(node)
    func = meant.func if isinstance(meant, ast.Call) else None
    if isinstance(meant, ast.expr) and isinstance(func, ast.Attribute) and func.attr in CHEAP:
        return _after(draft, meant, func.value, _log_of_others(draft, func.value))
    found = draft.operation(meant)
    chosen = draft.operation(found.operand) if found is not None else None
    if found is None or chosen is None or (found.name, chosen.name) != ("gather", "softmax"):
        return None
    dim, other = found.argument(1, "dim"), chosen.argument(1, "dim")
    index = found.argument(2, "index")
    if dim is None or other is None or index is None or not same(dim, other):
        return None
    scores, at = draft.again(chosen.operand, "scores"), draft.text(dim)
    rest = f'{scores}.scatter({at}, {draft.text(index)}, float("-inf"))'
    return f"{rest}.logsumexp({at}, True) - {scores}.logsumexp({at}, True)"


def _root_of(draft: Draft, found: Operation) -> Operation | None:
    """Return the operation whose square another one is."""
    is_power = found.name == "pow" and number_of(found.argument(1, "exponent")) == 2.0
    return draft.operation(found.operand) if is_power or found.name == "square" else None


def _log_chosen(draft: Draft, found: Operation) -> str | None:
    """Log of ``where(condition, p, q)``."""
    if len(found.args) != 3 or found.is_method or found.keywords:
        return None
    condition, *chosen = found.args
    logs = [log_of(draft, one) for one in chosen]
    if logs[0] is None or logs[1] is None:
        return None
    return f"{draft.torch('where')}({draft.text(condition)}, {logs[0]}, {logs[1]})"


_LOGS: Mapping[str, Callable[[Draft, Operation], str | None]] = {
    "softmax": _log_softmax,
    "sigmoid": _log_sigmoid,
    "exp": _log_exp,
    "cosh": log_cosh,
    "softplus": log_softplus,
    "expm1": log_expm1,
    "i0": log_i0,
    "erfc": log_erfc,
    "sum": _log_sum,
    "mean": _log_mean,
    "cumsum": _log_running_sum,
    "prod": _log_product,
    "mul": _log_of_both("+"),
    **dict.fromkeys(("matmul", "mm", "mv"), _log_of_matmul),
    "div": _log_quotient,
    "pow": _log_power,
    "add": _log_added,
    "sub": _log_taken_away,
    "where": _log_chosen,
}


def log_of_rest(draft: Draft, node: ast.expr) -> str:
    """Log of ``1 - exp(x)``: by expm1 near 0, by log1p elsewhere, as the form that is tried has it.

    Either half alone loses what the other keeps. The clamps keep the half that is not chosen from
    having no derivative: NaN times 0 is NaN.
    """
    x = draft.again(node, "exponent")
    near = f"{draft.torch('log')}(-{draft.torch('expm1')}({x}.clamp(min=-{_HALVES})))"
    far = f"{draft.torch('log1p')}(-{draft.torch('exp')}({x}.clamp(max=-{_HALVES})))"
    with suppress(NotKnownError):
        near, far = draft.named(near, "near", node), draft.named(far, "far", node)
    return f"{draft.torch('where')}({x} > -{_HALVES}, {near}, {far})"


def both_exponents(draft: Draft, found: Operation) -> tuple[ast.expr, ast.expr] | None:
    """Return a and b of ``exp(a) + exp(b)``; None for what is no such sum."""
    parts = [draft.operation(one) for one in found.args] if found.name == "add" else []
    first, second = (*parts, None, None)[:2]
    if first is None or second is None or first.name != "exp" or second.name != "exp":
        return None
    return None if found.keywords else (first.operand, second.operand)


def one_plus_exp(draft: Draft, found: Operation) -> ast.expr | None:
    """Return x of ``1 + exp(x)``; None for what is no such sum."""
    if found.name != "add":
        return None
    for one, other in (found.args, found.args[::-1]):
        inner = draft.operation(other)
        if number_of(one) == 1.0 and inner is not None and inner.name == "exp":
            return inner.operand
    return None
