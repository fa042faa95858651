"""The same model in other clothes: wrapped, with modules that do nothing, its loss elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Callable

from variants.loops import loops_of
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

HELD = "held"
"""The attribute under which a wrapper holds the model."""

_WRAPPER = f"""
class Wrapped(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.{HELD} = held

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("{HELD}"), name)

    def forward(self, *args, **kwargs):
        return RETURNED
"""
_WIDTHS = ("n_embd", "d_model", "dim", "hidden_size")


def _placed(tree: ast.Module, template: str) -> set[str]:
    """Put statements before each ``optimizer = ...(NAME.parameters())``; return the names."""
    found = set[str]()
    for block in blocks(tree):
        for one in list(block):
            if not isinstance(one, ast.Assign) or "optimizer" not in ast.unparse(one.targets[0]):
                continue
            whose = next(
                (
                    node.func.value
                    for node in ast.walk(one.value)
                    if isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "parameters"
                    and isinstance(node.func.value, ast.Name)
                ),
                None,
            )
            if whose is not None:
                number = block.index(one)
                block[number:number] = statements(template, one, MODEL=whose)
                found.add(whose.id)
    return found


def wrapped(script: Script) -> ast.Module | None:
    """Hold the model in a module that only calls it."""
    tree = script.tree()
    if not _placed(tree, "MODEL = Wrapped(MODEL)"):
        return None
    at_top(tree, _WRAPPER.replace("RETURNED", f"self.{HELD}(*args, **kwargs)"))
    return tree


def loss_inside(script: Script) -> ast.Module | None:
    """Take the model's loss in a module that holds the model."""
    tree = script.tree()
    models = _placed(tree, "with_loss = Wrapped(MODEL)")

    def change(node: ast.expr) -> ast.expr | None:
        if (
            not isinstance(node, ast.Attribute)
            or node.attr != "loss"
            or called(node.value) not in models
        ):
            return None
        assert isinstance(node.value, ast.Call)
        node.value.func = expression("with_loss", node)
        return node.value

    if not _in_loops(tree, change):
        return None
    at_top(tree, _WRAPPER.replace("RETURNED", f"self.{HELD}(*args, **kwargs).loss"))
    return tree


def loss_outside(script: Script) -> ast.Module | None:
    """Compute the loss of a language model from its logits, in the script."""
    tree = script.tree()

    def change(node: ast.expr) -> ast.expr | None:
        if not isinstance(node, ast.Attribute) or node.attr != "loss":
            return None
        call = node.value
        if not isinstance(call, ast.Call) or call.args or len(call.keywords) != 1:
            return None
        (batch,) = call.keywords
        if batch.arg is not None or not isinstance(call.func, ast.Name):
            return None
        text = (
            "torch.nn.functional.cross_entropy(MODEL(**{key_: held_ for key_, held_ in "
            "BATCH.items() if key_ != 'labels'}).logits[:, :-1].flatten(0, 1).float(), "
            "BATCH['labels'][:, 1:].flatten())"
        )
        return expression(text, node, MODEL=call.func, BATCH=batch.value)

    return tree if _in_loops(tree, change) else None


def _through(kind: str) -> Callable[[Script], ast.Module | None]:
    """Return a rewrite that sends what the model gives through a module that changes nothing."""

    def apply(script: Script) -> ast.Module | None:
        def change(node: ast.expr) -> ast.expr | None:
            if not isinstance(node, ast.Attribute) or node.attr not in ("loss", "logits"):
                return None
            if not isinstance(node.value, ast.Call) or not isinstance(node.value.func, ast.Name):
                return None
            return expression(f"torch.nn.{kind}(OUT)", node, OUT=node)

        return each_expression(script.tree(), change)

    return apply


def autocast_inside(script: Script) -> ast.Module | None:
    """Cast inside of the model's forward instead of around its call."""
    tree = script.tree()
    casts = [
        one
        for body in loops_of(tree)
        for node in body
        for one in ast.walk(node)
        if isinstance(one, ast.With) and called(one.items[0].context_expr) == "torch.autocast"
    ]
    if len(casts) != 1 or not _placed(tree, "MODEL.forward = CAST(MODEL.forward)"):
        return None
    cast = casts[0].items[0].context_expr

    def change(node: ast.expr) -> ast.expr | None:
        return cast if isinstance(node, ast.Name) and node.id == "CAST" else None

    each_expression(tree, change)
    for block in blocks(tree):
        if casts[0] in block:
            number = block.index(casts[0])
            block[number : number + 1] = casts[0].body
    return tree


def doubled(script: Script) -> ast.Module | None:
    """Double the width of the model that the script builds."""

    def change(node: ast.expr) -> ast.expr | None:
        if called(node) not in ("build", "llama", "qwen2") or not isinstance(node, ast.Call):
            return None
        given = [one for one in node.keywords if one.arg in _WIDTHS]
        for one in given:
            one.value = expression("2 * (WIDTH)", node, WIDTH=one.value)
        if not given:
            node.keywords.append(ast.keyword("hidden_size", expression("128", node)))
        return node

    return each_expression(script.tree(), change)


def _in_loops(tree: ast.Module, change: Callable[[ast.expr], ast.expr | None]) -> bool:
    """Change expressions of training loops only; return whether one was changed."""
    changed = False
    for body in loops_of(tree):
        held = ast.Module(body, [])
        changed |= each_expression(held, change) is not None
    return changed


REWRITES = (
    Rewrite("model-wrapped", wrapped, added=HELD),
    Rewrite("loss-inside", loss_inside, added=HELD),
    Rewrite("loss-outside", loss_outside),
    Rewrite("through-identity", _through("Identity()")),
    Rewrite("through-dropout-of-zero", _through("Dropout(0.0)")),
    Rewrite("autocast-inside", autocast_inside),
    Rewrite("width-doubled", doubled, keeps_numbers=False),
)
