"""The same function where it has a value, and one where it had none: 0 by 0, the root at 0."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping

from nanstop.records.line_forms import BETWEEN_POLES, HAVE_BOUNDS
from nanstop.records.vocabulary import LOSSES_OF_ELEMENTS
from nanstop.rewrite.draft import Draft, NotKnownError, is_steady
from nanstop.rewrite.forms.clamped import above_one, clamp, clamped, edged, is_root, log_of_more
from nanstop.rewrite.forms.guarded_losses import LOSSES
from nanstop.rewrite.operations import (
    FILLS,
    Operation,
    comes_from,
    compares_cheap,
    constant_of,
    is_cheap,
    is_one,
    number_of,
    operation,
    same,
)
from nanstop.rewrite.source import expressions_of

_INTEGERS = frozenset({"len", "int"})
_INTEGER_METHODS = frozenset({"numel", "size", "dim", "__len__"})
_NUMBERS = frozenset({"float", "max", "min"})
_NUMBER_METHODS = frozenset({"item"})
_HARMLESS = {"log": "1", "log2": "1", "log10": "1", "sqrt": "1", "rsqrt": "1", "pow": "1"}
_HARMLESS |= {"acos": "0", "asin": "0", "exp": "0", "log1p": "0", "reciprocal": "1"}
_HARMLESS |= {name: f"{sum(ends) / 2:g}" for name, ends in BETWEEN_POLES.items()}
"""What a function is given where its result is not chosen."""


def rewrite_guarded(draft: Draft, op: str = "") -> bool:
    """Return whether something of the statement could be rewritten; the draft holds it.

    ``op``: the failing operation without its overload: nothing else is rewritten. It may be one
    that a function of a library computes, and is not spelled in the statement then.
    """
    found = list(_operations(draft))
    spelled = _SPELLINGS.get(op, (op,)) if op else _FORMS.keys() - _ALONE
    if draft.bounded:
        spelled = (op,) if op in HAVE_BOUNDS else HAVE_BOUNDS
    named = [one for one in found if one.name in spelled]
    if draft.innermost:
        named = [one for one in named if not _holds(one, named)]
    done, taken = False, list[ast.AST]()
    if op and any(_holds(one, named) for one in named) and all(_is_clamped(one) for one in named):
        draft.edits += [edit for one in named for edit in clamp(draft, one)]
        return True
    for one in named:
        inside = {id(node) for node in ast.walk(one.node)}
        around = {id(node) for node in draft.source.around(one.node)}
        if any(id(node) in inside | around for node in taken):
            continue
        if _rewritten(draft, one):
            taken.append(one.node)
            done = True
    return done


def rewrite_held(draft: Draft) -> bool:
    """Return whether a fill with a number beyond its format could be rewritten as one with the
    farthest that the format holds; the draft holds it.
    """
    done = False
    nodes = [node for root in expressions_of(draft.statement) for node in ast.walk(root)]
    for found in (operation(draft.source, node) for node in nodes):
        given = found.argument(2, "value") if found is not None else None
        number = number_of(given)
        if found is None or found.name not in FILLS or number is None:
            continue
        if found.name == "masked_fill_" and not is_cheap(found.operand):
            raise NotKnownError  # a line before it would name what it is to write to
        value = draft.twice(found.operand, "filled")
        end = "min" if number < 0 else "max"
        text = draft.source.segment(found.node)
        if not is_cheap(found.operand):
            text = draft.with_operand(found, 0, value)
        assert given is not None
        old = draft.source.segment(given)
        head, _, tail = text.rpartition(old)
        number_text = f"{draft.torch('finfo')}({value}.dtype).{end}"
        draft.replaced(found.node, f"{head}{number_text}{tail}")
        done = True
    return done


def _operations(draft: Draft) -> list[Operation]:
    nodes = [node for root in expressions_of(draft.statement) for node in ast.walk(root)]
    found = [operation(draft.source, node) for node in nodes]
    known = [one for one in found if one is not None and one.name in _FORMS]
    return [one for one in known if not all(_is_number(draft, arg) for arg in one.args)]


def _is_number(draft: Draft, node: ast.expr) -> bool:
    return constant_of(draft.source, node) is not None


def _rewritten(draft: Draft, found: Operation) -> bool:
    lines, edits = len(draft.lines), len(draft.edits)
    try:
        text = _in_where(draft, found) or _FORMS[found.name](draft, found)
        if text is not None:
            draft.replaced(found.node, text)
            return True
    except NotKnownError:
        pass
    del draft.lines[lines:], draft.edits[edits:]
    return False


def _in_where(draft: Draft, found: Operation) -> str | None:
    """Return the operation of what ``torch.where`` around it chooses, harmless elsewhere."""
    inner: ast.AST = found.node
    for parent in draft.source.around(found.node):
        around = operation(draft.source, parent)
        if around is not None and around.name == "where" and len(around.args) == 3:
            condition, kept, other = around.args
            if around.is_method:
                condition, kept = kept, condition
            if inner is kept or inner is other:
                return _chosen(draft, found, condition, first=inner is kept)
        if not isinstance(parent, ast.expr):
            return None
        inner = parent
    return None


def _chosen(draft: Draft, found: Operation, condition: ast.expr, *, first: bool) -> str | None:
    place = 1 if found.name == "div" else 0
    harmless = "1" if found.name == "div" else _HARMLESS.get(found.name)
    if harmless is None or (not is_cheap(condition) and not compares_cheap(condition)):
        return None
    value = draft.source.segment(found.args[place])
    choice = f"{value}, {harmless}" if first else f"{harmless}, {value}"
    text = f"{draft.torch('where')}({draft.source.segment(condition)}, {choice})"
    return draft.with_operand(found, place, text)


def _inverse(draft: Draft, found: Operation) -> str:
    """Of what has a value, and 0 elsewhere: of a root what is above 0, else what is not 0."""
    exponent = number_of(found.argument(1, "exponent"))
    if not draft.masked or (found.name == "pow" and (exponent is None or exponent >= 0.0)):
        return clamped(draft, found)
    value = draft.twice(found.operand, "value")
    value = value if is_cheap(found.operand) or value.isidentifier() else f"({value})"
    has_root = found.name == "rsqrt" or (found.name == "pow" and _has_fraction(exponent))
    none = f"{value} {'<=' if has_root else '=='} 0"
    inner = draft.with_operand(found, 0, f"{value}.masked_fill({none}, 1)")
    inner = inner if isinstance(found.node, ast.Call) else f"({inner})"
    return f"{inner}.masked_fill({none}, 0)"


def _times_logarithm(draft: Draft, found: Operation) -> str | None:
    """Of a logarithm of what is above 0."""
    if len(found.args) != 2:
        return None
    read = draft.source.operand(found.args[1])
    return draft.with_operand(found, 1, f"{read}.clamp(min={draft.tiny(read)})")


def _has_fraction(exponent: float | None) -> bool:
    return exponent is not None and exponent != round(exponent)


def _holds(outer: Operation, named: Collection[Operation]) -> bool:
    """Return whether one of some operations stands within another one."""
    nodes = {id(one.node) for one in named}
    return any(id(node) in nodes for node in ast.walk(outer.node) if node is not outer.node)


def _is_clamped(found: Operation) -> bool:
    return _FORMS[found.name] in (clamped, _inverse) or (found.name == "pow" and _has_root(found))


def _has_root(found: Operation) -> bool:
    """Return whether a power may be one that is not whole, or below 0."""
    exponent = number_of(found.argument(1, "exponent"))
    return exponent is None or exponent < 0 or exponent != round(exponent)


def _root(draft: Draft, found: Operation) -> str | None:
    return _inverse(draft, found) if _has_root(found) else None


def _divided(draft: Draft, found: Operation) -> str | None:
    if len(found.args) != 2 or found.keywords or _is_number(draft, found.args[1]):
        return None
    divisor = found.args[1]
    if _is_integer(draft, divisor):  # 0, or 1 at least
        return draft.with_operand(found, 1, f"max({draft.source.segment(divisor)}, 1)")
    if draft.by_number or comes_from(draft.meant(divisor), _NUMBERS, _NUMBER_METHODS):
        return draft.with_operand(found, 1, f"({draft.source.segment(divisor)} or 1)")
    if draft.by_array:
        return _by_array(draft, found)
    if draft.kept or (draft.counted and not draft.masked):
        least = draft.tiny(draft.source.segment(divisor)) if draft.kept else "1"
        return draft.with_operand(found, 1, f"{draft.source.operand(divisor)}.clamp(min={least})")
    kept = None if draft.masked else _normalized(draft, found) or _by_root(draft, found)
    if kept is not None:
        return kept
    try:
        value = draft.twice(divisor, "divisor")
    except NotKnownError:  # within a lambda or a comprehension no line before it can name it
        if not draft.of_size or draft.infinite or draft.masked:
            raise
        least = "1e-4" if draft.dtype == "float16" else "1e-12"
        text = f"{draft.source.operand(divisor)}.clamp(min={least})"
        return draft.with_operand(found, 1, text)
    value = value if is_cheap(divisor) or value.isidentifier() else f"({value})"
    quotient = draft.with_operand(found, 1, f"{value}.masked_fill({value} == 0, 1)")
    if draft.infinite:  # else it is 0 / 0: 0 by anything is 0
        quotient = f"{draft.torch('where')}({value} == 0, 0, {quotient})"
    return quotient


def _by_root(draft: Draft, found: Operation) -> str | None:
    """Return the quotient of 0 by a root that is taken of more than 0: what is put in the place of
    the root alone leaves its derivative infinite. None for what is not that.
    """
    root = operation(draft.source, found.args[1])
    if draft.infinite or root is None or not is_root(root):
        return None
    return draft.with_operand(found, 1, clamped(draft, root))


def _by_array(draft: Draft, found: Operation) -> str:
    """Return the quotient by 1 where an array of NumPy's is 0: 0 by anything is 0."""
    where = draft.source.spelled("numpy.where")
    if where is None:
        raise NotKnownError
    value = draft.twice(found.args[1], "divisor")
    return draft.with_operand(found, 1, f"{where}({value} == 0, 1, {value})")


def _is_integer(draft: Draft, node: ast.expr) -> bool:
    """Return whether a value is a whole number of Python's: then it has no ``clamp``."""
    meant = draft.meant(node)
    shape = meant.value if isinstance(meant, ast.Subscript) else None
    sized = isinstance(shape, ast.Attribute) and shape.attr == "shape"
    return sized or comes_from(meant, _INTEGERS, _INTEGER_METHODS)


def _normalized(draft: Draft, found: Operation) -> str | None:
    """Return ``F.normalize`` of ``x / x.norm(dim=d, keepdim=True)``; None for what is not that."""
    norm, value = draft.operation(found.args[1]), found.operand
    if norm is None or norm.name != "norm" or draft.dtype in ("float16", "bfloat16"):
        return None
    keeps, dim = norm.keywords.get("keepdim"), norm.keywords.get("dim")
    power = norm.argument(1, "p")
    plain = len(norm.args) <= 2 and set(norm.keywords) - {"p"} == {"dim", "keepdim"}
    plain = plain and (power is None or number_of(power) == 2.0)
    if not plain or not isinstance(keeps, ast.Constant) or keeps.value is not True or dim is None:
        return None
    if not same(norm.operand, value) or not is_cheap(value):
        return None
    spelled = draft.source.spelled("torch.nn.functional.normalize")
    return spelled and f"{spelled}({draft.source.segment(value)}, dim={draft.source.segment(dim)})"


def _held_eps(draft: Draft, found: Operation) -> str | None:
    """Return the call with an eps that float16 holds, which the usual one is not; with the usual
    one where the program writes down 0.
    """
    given = found.argument(4, "eps")
    if given is not None and number_of(given) == 0.0:
        start = draft.source.span(found.node)[0]
        text, (first, last) = draft.source.segment(found.node), draft.source.span(given)
        usual = "1e-4" if draft.dtype == "float16" else "1e-12"
        usual = "1e-5" if found.name == "layer_norm" else usual
        return f"{text[: first - start]}{usual}{text[last - start :]}"
    is_given = found.name == "layer_norm" or found.argument(4, "eps") is not None
    if draft.dtype != "float16" or is_given or found.made_by:
        return None
    text = draft.source.segment(found.node)
    return f"{text[:-1].rstrip().rstrip(',')}, eps=1e-4)"


def _angle(draft: Draft, found: Operation) -> str | None:
    """Of what is not 0 twice, and of (0, 1) there."""
    if len(found.args) != 2 or found.keywords:
        return None
    above, below = draft.twice(found.args[0], "above"), draft.twice(found.args[1], "below")
    above, below = (one if one.isidentifier() else f"({one})" for one in (above, below))
    both = f"({above} == 0) & ({below} == 0)"
    return draft.with_operand(found, 1, f"{below}.masked_fill({both}, 1)")


def _mean(draft: Draft, found: Operation) -> str | None:
    """Return the sum over a count of at least 1."""
    if set(found.keywords) - {"dim", "keepdim"} or len(found.args) > 2:
        return None
    try:
        value = draft.twice(found.operand, "chosen")
    except NotKnownError:  # within a comprehension no line before it can name what is picked out
        if not isinstance(found.operand, ast.Subscript) or not is_steady(
            draft.source, found.operand
        ):
            raise
        value = draft.closed(found.operand)
    dim, picks = found.argument(1, "dim"), isinstance(found.operand, ast.Subscript)
    value = value if picks or is_cheap(found.operand) or value.isidentifier() else f"({value})"
    if dim is None:
        return f"{value}.sum() / max({value}.numel(), 1)" if not found.keywords else None
    if number_of(dim) is None:
        return None
    keeps = found.keywords.get("keepdim")
    rest = f", keepdim={draft.source.segment(keeps)}" if keeps is not None else ""
    at = draft.source.segment(dim)
    return f"{value}.sum({at}{rest}) / max({value}.shape[{at}], 1)"


def _deviation(draft: Draft, found: Operation) -> str | None:
    """Return the deviation, or the covariance, of one value as that of a population: 0."""
    dim = found.argument(1, "dim")
    kept = {name for name in ("unbiased", "correction") if is_one(found.keywords.get(name))}
    alone = len(found.args) <= 2 and not set(found.keywords) - {"dim", "keepdim", *kept}
    if not alone or (dim is not None and number_of(dim) is None):
        return None
    value = draft.twice(found.operand, "values")
    at = f"{value}.shape[{draft.source.segment(dim)}]" if dim is not None else f"{value}.numel()"
    rest = [f"dim={draft.source.segment(dim)}"] if dim is not None else []
    keeps = found.keywords.get("keepdim")
    rest += [f"keepdim={draft.source.segment(keeps)}"] if keeps is not None else []
    at = f"{value}.shape[-1]" if found.name == "cov" else at
    rest.append(f"correction=min(1, {at} - 1)")
    if found.name.endswith("_mean") or found.name == "cov":
        return f"{draft.torch(found.name)}({', '.join((value, *rest))})"
    return f"{value}.{found.name}({', '.join(rest)})"


def _masked_product(draft: Draft, found: Operation) -> str | None:
    """Return a product that is masked afterwards: 0 * -Inf is NaN."""
    place = draft.hiding
    if place is None or len(found.args) != 2 or found.keywords:
        return None
    mask = draft.twice(found.args[place], "mask")
    hidden = f'{mask if mask.isidentifier() else f"({mask})"} == float("-inf")'
    product = draft.with_operand(found, place, f"{mask}.masked_fill({hidden}, 0.0)")
    product = product if isinstance(found.node, ast.Call) else f"({product})"
    return f'{product}.masked_fill({hidden}, float("-inf"))'


def _softmax(draft: Draft, found: Operation) -> str | None:
    """Return zeros for a row of which all is masked."""
    dim = found.argument(1, "dim")
    if dim is None or number_of(dim) is None:
        return None
    scores = draft.twice(found.operand, "scores")
    at = draft.source.segment(dim)
    hidden = f'({scores} == float("-inf")).all({at}, keepdim=True)'
    empty = draft.named(hidden, "empty", found.operand)
    if found.made_by is not None or not is_cheap(found.operand):
        scores = scores if scores.isidentifier() else f"({scores})"
    inner = draft.with_operand(found, 0, f"{scores}.masked_fill({empty}, 0.0)")
    return f"{inner}.masked_fill({empty}, 0.0)" if found.name == "softmax" else inner


_FORMS: Mapping[str, Callable[[Draft, Operation], str | None]] = {
    "div": _divided,
    **dict.fromkeys(("log", "log2", "log10", "exp", "lgamma", "entr"), clamped),
    "xlogy": _times_logarithm,
    "log1p": log_of_more,
    "sqrt": clamped,
    "rsqrt": _inverse,
    "pow": _root,
    "acosh": above_one,
    "atan2": _angle,
    **dict.fromkeys(("acos", "asin", *BETWEEN_POLES), edged),
    "mean": _mean,
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "cov"), _deviation),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **LOSSES,
    **dict.fromkeys(("normalize", "layer_norm"), _held_eps),
    "mul": _masked_product,
}
_ALONE = {"exp", "mean", "mul", *LOSSES_OF_ELEMENTS}  # rewritten only where it fails itself
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "_softmax": ("softmax",),
    "_safe_softmax": ("softmax",),
    "_log_softmax": ("log_softmax",),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), ("cross_entropy", "nll_loss")),
    "_ctc_loss": ("ctc_loss",),
    "native_layer_norm": ("layer_norm",),
    "div": ("div", "normalize", "cov"),
    "true_divide": ("div",),
    "reciprocal": ("div", "reciprocal"),
    "xlogy": ("xlogy", "kl_div"),
    "sqrt": ("sqrt", "pow"),
    "rsqrt": ("rsqrt", "pow"),
    "pow": ("pow", "sqrt", "rsqrt"),
    "var_mean": ("var", "std", "var_mean", "std_mean"),
}
"""How the operations that torch records are spelled in Python."""
