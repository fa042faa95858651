"""The same function of torch by another name: methods, functions, modules, or written out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from variants.script import Change, Rewrite, Script, called, each_expression, expression, is_simple

_METHODS = """
    abs clamp exp expm1 gather log log1p log_softmax logsumexp masked_fill mean relu rsqrt sigmoid
    softmax sqrt square std sum tanh
"""
_BOTH = frozenset(_METHODS.split())
"""Methods of a tensor that torch has as functions, too."""
_SPACES = ("torch", "F", "functional", "nn.functional", "torch.nn.functional")
_MODULES: Mapping[str, tuple[str, int]] = {
    "cross_entropy": ("CrossEntropyLoss", 2),
    "kl_div": ("KLDivLoss", 2),
    "mse_loss": ("MSELoss", 2),
    "nll_loss": ("NLLLoss", 2),
    "logsigmoid": ("LogSigmoid", 1),
    "softplus": ("Softplus", 1),
    "softmax": ("Softmax", 1),
    "log_softmax": ("LogSoftmax", 1),
}
"""Functions that are modules, too, with how many of their arguments are tensors."""


def _function(node: ast.expr) -> tuple[str, list[ast.expr], list[ast.keyword]]:
    """Return the name, arguments and options of a call of one of torch's functions."""
    space, _, name = called(node).rpartition(".")
    if space not in _SPACES or not isinstance(node, ast.Call):
        return "", [], []
    return name, node.args, node.keywords


def _method(node: ast.expr) -> tuple[str, ast.expr | None]:
    """Return the name and the tensor of a method that is a function, too."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return "", None
    whose = ast.unparse(node.func.value)
    if node.func.attr not in _BOTH or whose in _SPACES:
        return "", None
    return node.func.attr, node.func.value


def _as_function(node: ast.expr) -> ast.expr | None:
    name, whose = _method(node)
    if whose is None or not isinstance(node, ast.Call):
        return None
    func = expression(f"torch.{name}", node)
    return ast.copy_location(ast.Call(func, [whose, *node.args], node.keywords), node)


def _as_method(node: ast.expr) -> ast.expr | None:
    name, args, keywords = _function(node)
    if name not in _BOTH or not args:
        return None
    func = expression(f"OF.{name}", node, OF=args[0])
    return ast.copy_location(ast.Call(func, args[1:], keywords), node)


def _as_module(node: ast.expr) -> ast.expr | None:
    name, args, keywords = _function(node)
    kind, num_tensors = _MODULES.get(name, ("", 0))
    options = args[num_tensors:]
    if not kind or len(args) < num_tensors or (options and not name.endswith("softmax")):
        return None
    made = ast.Call(expression(f"torch.nn.{kind}", node), options, keywords)
    called_with = ast.Call(ast.copy_location(made, node), args[:num_tensors], [])
    return ast.copy_location(called_with, node)


def _written_out(node: ast.expr) -> ast.expr | None:
    name, args, keywords = _function(node)
    options = {one.arg: one.value for one in keywords}
    if (
        name == "cross_entropy"
        and len(args) == 2
        and not {"label_smoothing", None} & options.keys()
    ):
        inner = expression("torch.nn.functional.log_softmax(OF, 1)", node, OF=args[0])
        func = expression("torch.nn.functional.nll_loss", node)
        return ast.copy_location(ast.Call(func, [inner, args[1]], keywords), node)
    if name == "mse_loss" and len(args) == 2 and not options:
        return expression("(A - B).square().mean()", node, A=args[0], B=args[1])
    if name == "logsigmoid" and len(args) == 1:
        return expression("-torch.nn.functional.softplus(-OF)", node, OF=args[0])
    if name == "normalize" and is_simple(args[0]) and options.keys() == {"dim"}:
        text = "OF / OF.norm(dim=DIM, keepdim=True).clamp(min=1e-12)"
        return expression(text, node, OF=args[0], DIM=options["dim"])
    if name in ("log_softmax", "softmax") and len(args) == 2 and is_simple(args[0]) and not options:
        text = "OF - OF.logsumexp(DIM, keepdim=True)"
        text = text if name == "log_softmax" else f"({text}).exp()"
        return expression(text, node, OF=args[0], DIM=args[1])
    return None


def _mean_as_sum(node: ast.expr) -> ast.expr | None:
    name, whose = _method(node)
    plain = isinstance(node, ast.Call) and not node.args and not node.keywords
    if name != "mean" or whose is None or not plain or not is_simple(whose):
        return None
    return expression("OF.sum() / OF.numel()", node, OF=whose)


def _masked_by_where(node: ast.expr) -> ast.expr | None:
    name, whose = _method(node)
    if name != "masked_fill" or whose is None or not isinstance(node, ast.Call) or node.keywords:
        return None
    mask, value = node.args
    return expression("torch.where(MASK, VALUE, OF)", node, MASK=mask, VALUE=value, OF=whose)


def _product(template: str) -> Callable[[Script], ast.Module | None]:
    """Return a rewrite of every product of matrices."""

    def apply(script: Script) -> ast.Module | None:
        def change(node: ast.expr) -> ast.expr | None:
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                return expression(template, node, A=node.left, B=node.right)
            name, args, _ = _function(node)
            if name not in ("matmul", "bmm") or template.startswith("torch.matmul"):
                return None
            return expression(template, node, A=args[0], B=args[1])

        return each_expression(script.tree(), change)

    return apply


def _each(change: Change) -> Callable[[Script], ast.Module | None]:
    return lambda script: each_expression(script.tree(), change)


REWRITES = (
    Rewrite("methods-as-functions", _each(_as_function)),
    Rewrite("functions-as-methods", _each(_as_method)),
    Rewrite(
        "functions-as-modules",
        _each(_as_module),
        modules=tuple(kind for kind, _ in _MODULES.values()),
    ),
    Rewrite("losses-written-out", _each(_written_out)),
    Rewrite("mean-as-sum", _each(_mean_as_sum)),
    Rewrite("masked-by-where", _each(_masked_by_where)),
    Rewrite("products-by-einsum", _product("torch.einsum('...ij,...jk->...ik', A, B)")),
    Rewrite("products-by-matmul", _product("torch.matmul(A, B)")),
)
