"""The same run of a Trainer: another class of it, another data set, a callback, other rows."""

from __future__ import annotations

import ast

from variants.script import (
    Rewrite,
    Script,
    at_top,
    blocks,
    called,
    each_expression,
    expression,
    statements,
)

_AGAIN = """
class Again(KIND):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)
"""
_ROWS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]
"""
_REVERSED = """
def reversed_by(rows, size):
    ends = range(size - 1, len(rows), size)
    return [rows[end - one] for end in ends for one in range(size)]
"""


def _is_trainer(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(one.arg == "train_dataset" for one in node.keywords)


def subclassed(script: Script) -> ast.Module | None:
    """Train with a subclass that adds nothing."""

    def change(node: ast.expr) -> ast.expr | None:
        if not _is_trainer(node) or not isinstance(node, ast.Call):
            return None
        node.func = expression("type('Again', (KIND,), {})", node, KIND=node.func)
        return node

    return each_expression(script.tree(), change)


def loss_once_more(script: Script) -> ast.Module | None:
    """Train with a subclass whose ``compute_loss`` is that of its parent."""
    tree = script.tree()
    for block in blocks(tree):
        for number, one in enumerate(block):
            if not isinstance(one, ast.Assign | ast.Expr):
                continue
            calls = [node for node in ast.walk(one) if _is_trainer(node)]
            if not calls or not isinstance(calls[0], ast.Call):
                continue
            made = statements(_AGAIN, one, KIND=calls[0].func)
            calls[0].func = expression("Again", one)
            block[number:number] = made
            return tree
    return None


def _with_data(script: Script, text: str, top: str) -> ast.Module | None:
    def change(node: ast.expr) -> ast.expr | None:
        if not _is_trainer(node) or not isinstance(node, ast.Call):
            return None
        for one in node.keywords:
            if one.arg == "train_dataset":
                one.value = expression(text, node, DATA=one.value)
        return node

    tree = each_expression(script.tree(), change)
    if tree is not None:
        at_top(tree, top)
    return tree


def data_in_a_class(script: Script) -> ast.Module | None:
    """Hold the rows in a data set of the script's own."""
    return _with_data(script, "Rows(DATA)", _ROWS)


def rows_reversed(script: Script) -> ast.Module | None:
    """Reverse the rows of each micro-batch, where they come in the order of the data set."""
    if "sequential" not in script.source:
        return None
    sizes = {
        ast.literal_eval(one.value)
        for node in ast.walk(script.tree())
        if isinstance(node, ast.Call)
        for one in node.keywords
        if one.arg == "per_device_train_batch_size" and isinstance(one.value, ast.Constant)
    }
    size = sizes.pop() if len(sizes) == 1 else 2
    return _with_data(script, f"reversed_by(DATA, {size})", _REVERSED) if size > 1 else None


def with_a_callback(script: Script) -> ast.Module | None:
    """Add a callback that does nothing."""

    def change(node: ast.expr) -> ast.expr | None:
        if not _is_trainer(node) or not isinstance(node, ast.Call):
            return None
        if any(one.arg == "callbacks" for one in node.keywords):
            return None
        made = expression("[transformers.TrainerCallback()]", node)
        node.keywords.append(ast.keyword("callbacks", made))
        return node

    tree = each_expression(script.tree(), change)
    if tree is not None:
        at_top(tree, "import transformers")
    return tree


def started_apart(script: Script) -> ast.Module | None:
    """Keep the trainer under a name before it trains."""
    tree = script.tree()
    for block in blocks(tree):
        for number, one in enumerate(block):
            if not isinstance(one, ast.Expr) or not called(one.value).endswith(".train"):
                continue
            function = one.value.func  # type: ignore[attr-defined]
            if _is_trainer(function.value):
                block[number:number] = statements("kept_ = MADE", one, MADE=function.value)
                function.value = expression("kept_", one)
                return tree
    return None


REWRITES = (
    Rewrite("trainer-subclassed", subclassed),
    Rewrite("loss-asked-once-more", loss_once_more),
    Rewrite("data-in-a-class", data_in_a_class),
    Rewrite("rows-of-data-reversed", rows_reversed, rows="reversed"),
    Rewrite("with-a-callback", with_a_callback),
    Rewrite("trainer-kept", started_apart),
)
