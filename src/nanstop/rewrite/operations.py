"""Torch's operations as they are spelled: functions, methods, operators and modules alike."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanstop.records import FORMAT_MAX
from nanstop.rewrite.source import Source

_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Div: "div",
    ast.Mult: "mul",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
_SAME: Mapping[str, str] = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "expit": "sigmoid",
    "arccosh": "acosh",
    "arccos": "acos",
    "arcsin": "asin",
    "arctanh": "atanh",
    "arctan2": "atan2",
    "vector_norm": "norm",
}
_MODULES: Mapping[str, str] = {
    "torch.nn.Softmax": "softmax",
    "torch.nn.LogSoftmax": "log_softmax",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.Tanh": "tanh",
    "torch.nn.BCELoss": "binary_cross_entropy",
    "torch.nn.CrossEntropyLoss": "cross_entropy",
    "torch.nn.NLLLoss": "nll_loss",
    "torch.nn.CTCLoss": "ctc_loss",
    "torch.nn.MSELoss": "mse_loss",
    "torch.nn.L1Loss": "l1_loss",
    "torch.nn.SmoothL1Loss": "smooth_l1_loss",
    "torch.nn.HuberLoss": "huber_loss",
    "torch.nn.BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
}
_HELD: Mapping[str, str] = dict.fromkeys(("cross_entropy", "nll_loss"), "weight")
"""What a module is given and keeps under the same name."""
CASTS = frozenset({"half", "bfloat16", "to", "type"})
"""Methods that may give a tensor a format of half precision."""
METHODS = CASTS.union(
    {"softmax", "sigmoid", "log_softmax", "log", "log2", "log10", "log1p", "exp", "expm1", "sum"}
    | {"prod", "mean", "std", "norm", "sqrt", "rsqrt", "pow", "acos", "asin", "atanh", "div"}
    | {"acosh", "atan2", "arctan2", "tanh", "cosh", "var", "std_mean", "var_mean"}
    | {"arccos", "arcsin", "arctanh", "mul", "add", "sub", "neg", "true_divide", "multiply"}
    | {"masked_fill", "abs", "square", "where", "reciprocal", "gather", "logsumexp", "divide"}
    | {"matmul", "mm", "bmm", "dot", "mv", "float"}
    | {"cumsum", "i0", "erf", "erfc", "lgamma", "xlogy", "atanh", "erfinv", "logit"}
)
"""Methods of a tensor that are read as operations."""
FILLS = ("masked_fill", "masked_fill_")
"""Methods that put a number where a mask is, into a new tensor and in place."""
_INFINITIES = frozenset({"math.inf", "torch.inf", "numpy.inf", "numpy.infty"})
_READ = METHODS.union(FILLS, ("new_empty",))
CHEAP = frozenset(
    {"view", "reshape", "squeeze", "unsqueeze", "transpose", "permute", "flatten", "size", "dim"}
    | {"numel", "expand", "detach", "contiguous"}
)
"""Methods that give another view of a tensor: naming them twice costs nothing."""


@dataclass(frozen=True, slots=True)
class Operation:
    """``args``: the operand first, also of a method. ``made_by``: the constructor's call where a
    module is called.
    """

    name: str
    node: ast.expr
    args: tuple[ast.expr, ...]
    keywords: Mapping[str, ast.expr] = field(default_factory=dict[str, ast.expr])
    made_by: ast.Call | None = None

    def argument(self, place: int, name: str) -> ast.expr | None:
        """Return an argument by its place (the operand is 0) or its name."""
        return self.args[place] if place < len(self.args) else self.keywords.get(name)

    @property
    def operand(self) -> ast.expr:
        """What the operation is of."""
        return self.args[0]

    @property
    def is_method(self) -> bool:
        """Whether it is spelled as a method of its operand."""
        func = self.node.func if isinstance(self.node, ast.Call) else None
        return isinstance(func, ast.Attribute) and bool(self.args) and func.value is self.args[0]


def operation(source: Source, node: ast.AST) -> Operation | None:
    """Return what a node computes, None for what is no operation that is known."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return Operation(_OPERATORS[type(node.op)], node, (node.left, node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        is_number = number_of(node) is not None or infinity_of(source, node) is not None
        return None if is_number else Operation("neg", node, (node.operand,))
    if not isinstance(node, ast.Call) or any(isinstance(one, ast.Starred) for one in node.args):
        return None
    keywords = {one.arg: one.value for one in node.keywords if one.arg is not None}
    if len(keywords) != len(node.keywords):
        return None
    full = source.qualified(node.func)
    if full.startswith("torch.") and not full.startswith("torch.nn.modules"):
        named = keywords.pop("input", None)
        args = (*((named,) if named is not None else ()), *node.args)
        name = full.rpartition(".")[2]
        return Operation(_SAME.get(name, name), node, args, keywords) if args else None
    if isinstance(node.func, ast.Attribute) and node.func.attr in _READ:
        if not source.is_value(node.func.value):
            return None
        name = _SAME.get(node.func.attr, node.func.attr)
        return Operation(name, node, (node.func.value, *node.args), keywords)
    return _module_call(source, node, keywords)


def _module_call(
    source: Source, node: ast.Call, keywords: Mapping[str, ast.expr]
) -> Operation | None:
    made = node.func if isinstance(node.func, ast.Call) else constructor_of(source, node.func)
    name = _MODULES.get(source.qualified(made.func)) if made is not None else None
    if made is None or name is None or not node.args:
        return None
    if name in ("softmax", "log_softmax") and made.args:
        keywords = {**keywords, "dim": made.args[0]}
    given = {one.arg: one.value for one in made.keywords if one.arg is not None}
    elsewhere = made is not node.func
    apart = _HELD.get(name, "")  # which the module itself has
    if apart and made.args:
        given[apart] = made.args[0]
    if elsewhere and any(
        not isinstance(one, ast.Constant) for key, one in given.items() if key != apart
    ):
        return None  # its names may mean something else here
    return Operation(name, node, tuple(node.args), {**given, **keywords}, made_by=made)


def constructor_of(source: Source, name: ast.expr) -> ast.Call | None:
    """Return the call whose result a name or ``self.NAME`` is, where the file binds it once."""
    if not isinstance(name, ast.Name | ast.Attribute):
        return None
    bound = source.stored.get(ast.unparse(name), [])
    made = source.parents[bound[0]] if len(bound) == 1 else None
    value = made.value if isinstance(made, ast.Assign) and len(made.targets) == 1 else None
    return value if isinstance(value, ast.Call) else None


def is_cheap(node: ast.AST) -> bool:
    """Return whether a value may be written twice: nothing is computed anew, nothing drawn."""
    if isinstance(node, ast.Name | ast.Constant):
        return True
    if isinstance(node, ast.Attribute):
        return is_cheap(node.value)
    if isinstance(node, ast.Call):
        func = node.func
        method = isinstance(func, ast.Attribute) and func.attr in CHEAP and is_cheap(func.value)
        return method and all(map(is_cheap, node.args)) and not node.keywords
    if isinstance(node, ast.UnaryOp):
        return is_cheap(node.operand)
    if isinstance(node, ast.Subscript):
        return is_cheap(node.value) and _is_view(node.slice)
    return False


def is_size(node: ast.AST) -> bool:
    """Return whether a node is the length of a dimension, or a number of elements."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Name):
        return func.id == "len"
    return isinstance(func, ast.Attribute) and func.attr in ("size", "numel", "nelement")


def _is_view(index: ast.AST) -> bool:
    if isinstance(index, ast.Tuple):
        return all(map(_is_view, index.elts))
    if isinstance(index, ast.Slice):
        parts = (index.lower, index.upper, index.step)
        return all(part is None or is_cheap(part) for part in parts)
    return isinstance(index, ast.UnaryOp | ast.Constant | ast.Name) and is_cheap(index)


def number_of(node: ast.AST | None) -> float | None:
    """Return the number that a node spells, None where it spells none."""
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return sign * float(node.value)  # pyright: ignore[reportArgumentType]
    return None


def constant_of(source: Source, node: ast.AST) -> float | None:
    """Return the number that a node comes to by Python's arithmetic of numbers that it spells
    (``math.sqrt(2 * math.pi)``); None where that is no number.
    """
    spelled = number_of(node)
    if spelled is not None:
        return spelled
    if isinstance(node, ast.Attribute | ast.Name):
        return _NUMBERS.get(source.qualified(node))
    function, given = None, list[ast.expr]()
    if isinstance(node, ast.BinOp):
        function, given = _ARITHMETIC.get(type(node.op)), [node.left, node.right]
    elif isinstance(node, ast.Call) and not node.keywords:
        function, given = _OF_NUMBERS.get(source.qualified(node.func)), node.args
    values = [constant_of(source, one) for one in given]
    known = [value for value in values if value is not None]
    if function is None or len(known) < len(values):
        return None
    try:
        return float(function(*known))
    except (ArithmeticError, TypeError, ValueError):
        return None


_NUMBERS: Mapping[str, float] = {"math.pi": math.pi, "torch.pi": math.pi, "numpy.pi": math.pi}
_ARITHMETIC: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "math.sqrt": math.sqrt,
    "math.log": math.log,
    "math.exp": math.exp,
    "numpy.sqrt": math.sqrt,
}


def is_one(node: ast.AST | None) -> bool:
    """Return whether a node spells 1, or that something is so."""
    return isinstance(node, ast.Constant) and node.value == 1


def infinity_of(source: Source, node: ast.AST) -> float | None:
    """Return the infinity that a node spells, None where it spells none."""
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    if isinstance(node, ast.Attribute | ast.Name):
        return sign * math.inf if source.qualified(node) in _INFINITIES else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id != "float" or len(node.args) != 1:
        return None
    given = node.args[0]
    if not isinstance(given, ast.Constant) or not isinstance(given.value, str):
        return None
    text = given.value.strip().lower()
    value = float(text) if text.lstrip("+-") in ("inf", "infinity") else 0.0
    return sign * value if value else None


def end_of_format(node: ast.AST) -> float | None:
    """Return the end of a format that a node spells: ``torch.finfo(torch.float32).min``."""
    called = node.value if isinstance(node, ast.Attribute) else None
    if not isinstance(node, ast.Attribute) or not isinstance(called, ast.Call):
        return None
    if not ast.unparse(called.func).endswith("finfo") or len(called.args) != 1:
        return None
    most = FORMAT_MAX.get(ast.unparse(called.args[0]).removeprefix("torch."))
    sign = {"min": -1.0, "max": 1.0}.get(node.attr)
    return None if most is None or sign is None else sign * most


def beyond(node: ast.AST, most: float) -> float | None:
    """Return the number that a node spells where a format that ends at ``most`` has none for it."""
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    value = node.value if isinstance(node, ast.Constant) else end_of_format(node)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= most:
        return None
    return sign * value


def same(first: ast.AST, second: ast.AST) -> bool:
    """Return whether two nodes spell one thing."""
    return ast.dump(first) == ast.dump(second)


def compares_cheap(node: ast.expr) -> bool:
    """Return whether a comparison may be written twice."""
    return isinstance(node, ast.Compare) and all(map(is_cheap, (node.left, *node.comparators)))


def comes_from(node: ast.AST, functions: Collection[str], methods: Collection[str]) -> bool:
    """Return whether a value is what one of Python's functions, or a method, returns."""
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Name):
        return func.id in functions
    return isinstance(func, ast.Attribute) and func.attr in methods
