"""Training loops in torch: where backward is called, and the same step taken in other ways."""

from __future__ import annotations

import ast

from variants.script import Rewrite, Script, blocks, called, each_expression, expression, statements

SCALE, REPEATS = 8.0, 4


def backward_in(block: list[ast.stmt]) -> tuple[int, ast.Attribute] | None:
    """Return which statement of a block calls ``backward``, and the call's function."""
    for number, one in enumerate(block):
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            function = one.value.func
            if isinstance(function, ast.Attribute) and function.attr == "backward":
                return number, function
    return None


def loops_of(tree: ast.Module) -> list[list[ast.stmt]]:
    """Return the bodies of loops in which ``backward`` is called directly."""
    found = [node.body for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    return [body for body in found if backward_in(body) is not None]


def _steps_in(block: list[ast.stmt]) -> bool:
    """Whether each backward call of a block is followed by an update in the same block."""
    return any(isinstance(one, ast.Expr) and called(one.value) == "optimizer.step" for one in block)


def loss_in_a_function(script: Script) -> ast.Module | None:
    """Compute the loss in a function inside of the loop."""
    tree = script.tree()
    changed = False
    for body in loops_of(tree):
        for one in body:
            if not isinstance(one, ast.Assign) or ast.unparse(one.targets[0]) != "loss":
                continue
            made = statements("def loss_of_this():\n    return LOSS", one, LOSS=one.value)
            one.value = expression("loss_of_this()", one)
            body[body.index(one) : body.index(one)] = made
            changed = True
            break
    return tree if changed else None


def scaled_by_hand(script: Script) -> ast.Module | None:
    """Multiply the loss by a power of two, and divide the gradients by it."""
    tree = script.tree()
    changed = False
    undo = (
        "for group_ in optimizer.param_groups:\n    for parameter_ in group_['params']:\n"
        f"        if parameter_.grad is not None:\n            parameter_.grad /= {SCALE}"
    )
    for body in loops_of(tree):
        found = backward_in(body)
        if found is None or not _steps_in(body):
            continue
        number, function = found
        function.value = expression(f"(LOSS * {SCALE})", function, LOSS=function.value)
        body[number + 1 : number + 1] = statements(undo, body[number])
        changed = True
    return tree if changed else None


def scaled_by_a_scaler(script: Script) -> ast.Module | None:
    """Have a scaler multiply the loss and divide the gradients."""
    tree = script.tree()
    text = f"scaler_ = torch.amp.GradScaler('cpu', init_scale={SCALE}, growth_interval=10**6)"
    changed = False
    for block in blocks(tree):
        found = backward_in(block)
        if found is None or not _steps_in(block) or "scaler" in script.source:
            continue
        number, function = found
        function.value = expression("scaler_.scale(LOSS)", function, LOSS=function.value)
        step = next(
            one
            for one in block
            if isinstance(one, ast.Expr) and called(one.value) == "optimizer.step"
        )
        update = statements("scaler_.step(optimizer)\nscaler_.update()", step)
        block[block.index(step) : block.index(step) + 1] = update
        block[number + 1 : number + 1] = statements("scaler_.unscale_(optimizer)", block[number])
        changed = True
    for block in blocks(tree) if changed else ():
        for one in list(block):
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "optimizer":
                block[block.index(one) : block.index(one)] = statements(text, one)
    return tree if changed else None


def accumulated(script: Script) -> ast.Module | None:
    """Take each micro-batch four times, at a quarter of its loss."""
    tree = script.tree()
    changed = False
    for body in loops_of(tree):
        found = backward_in(body)
        if found is None or not _steps_in(body):
            continue
        number, function = found
        function.value = expression(f"(LOSS / {REPEATS})", function, LOSS=function.value)
        (loop,) = statements(f"for repeat_ in range({REPEATS}):\n    pass", body[number])
        assert isinstance(loop, ast.For)
        first = _first_of_loss(body[: number + 1])
        loop.body = body[first : number + 1]
        body[first : number + 1] = [loop]
        changed = True
    return tree if changed else None


def _first_of_loss(before: list[ast.stmt]) -> int:
    """Return where the statements begin that must run again: what takes from a batch must not."""
    takes = [
        number
        for number, one in enumerate(before)
        if any(called(node).endswith(".pop") for node in ast.walk(one))
        or isinstance(one, ast.AugAssign)
    ]
    return takes[-1] + 1 if takes else 0


def cleared_by_hand(script: Script) -> ast.Module | None:
    """Set every gradient to None instead of calling ``zero_grad``."""
    tree = script.tree()
    text = (
        "for group_ in OPTIMIZER.param_groups:\n    for parameter_ in group_['params']:\n"
        "        parameter_.grad = None"
    )
    changed = False
    for block in blocks(tree):
        for one in block:
            if isinstance(one, ast.Expr) and called(one.value) == "optimizer.zero_grad":
                place = block.index(one)
                block[place : place + 1] = statements(
                    text, one, OPTIMIZER=expression("optimizer", one)
                )
                changed = True
    return tree if changed else None


def rows_reversed(script: Script) -> ast.Module | None:
    """Reverse the rows of each batch, where it is made or taken."""
    tree = script.tree()
    changed = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.For):
            continue
        name = batch_of(node)
        if name and any(backward_in(block) for block in blocks(node)):
            text = "NAME = {key_: held_.flip(0) for key_, held_ in NAME.items()}"
            node.body[:0] = statements(text, node, NAME=ast.Name(name, ast.Load()))
            changed = True
    return tree if changed else _ids_reversed(script)


def batch_of(loop: ast.For) -> str:
    """Return the name under which a loop holds its batch: what is passed on with ``**``."""
    targets = {one.id for one in ast.walk(loop.target) if isinstance(one, ast.Name)}
    for node in ast.walk(loop):
        if isinstance(node, ast.Call):
            for one in node.keywords:
                if one.arg is None and isinstance(one.value, ast.Name) and one.value.id in targets:
                    return one.value.id
    return ""


def _ids_reversed(script: Script) -> ast.Module | None:
    """Reverse the rows of ``ids = token_batches(...)[0]["input_ids"]`` inside of a loop."""

    tree = script.tree()
    changed = False
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        for one in ast.walk(loop):
            if not isinstance(one, ast.Assign) or not isinstance(one.value, ast.Subscript):
                continue
            if ast.unparse(one.value).startswith("token_batches(") and ast.unparse(
                one.value
            ).endswith("[0]['input_ids']"):
                one.value = expression("IDS.flip(0)", one, IDS=one.value)
                changed = True
    return tree if changed else None


def ignored_otherwise(script: Script) -> ast.Module | None:
    """Give the entries that a loss ignores another number."""

    def change(node: ast.expr) -> ast.expr | None:
        if not called(node).endswith("cross_entropy") or not isinstance(node, ast.Call):
            return None
        for one in node.keywords:
            if one.arg == "ignore_index" and len(node.args) > 1:
                text = "torch.where(LABELS == IGNORED, -77, LABELS)"
                node.args[1] = expression(text, node, LABELS=node.args[1], IGNORED=one.value)
                one.value = expression("-77", node)
                return node
        return None

    return each_expression(script.tree(), change)


REWRITES: tuple[Rewrite, ...] = (
    Rewrite("loss-in-a-function", loss_in_a_function),
    Rewrite("loss-scaled-by-hand", scaled_by_hand),
    Rewrite("loss-scaled-by-a-scaler", scaled_by_a_scaler),
    Rewrite("accumulated-by-four", accumulated),
    Rewrite("gradients-cleared-by-hand", cleared_by_hand),
    Rewrite("rows-reversed", rows_reversed, rows="reversed"),
    Rewrite("ignored-otherwise", ignored_otherwise),
)
