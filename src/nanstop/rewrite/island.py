"""An island without nanstop: a dozen lines of plain PyTorch for a user's script."""

from __future__ import annotations

import ast

from nanstop.records import Atom
from nanstop.rewrite.arguments import calls
from nanstop.rewrite.source import Edit, Source

_LINES = """\
import copy
from torch.utils._pytree import tree_leaves, tree_map

def in_float32(module):
    inner, half = copy.copy(module), (torch.float16, torch.bfloat16)
    def forward(*args, **kwargs):
        state = dict(inner.named_parameters()) | dict(inner.named_buffers())
        given = [x for x in tree_leaves((args, kwargs, list(state.values()))) if torch.is_tensor(x)]
        emitted = next(x.dtype for x in given if x.is_floating_point())
        wide = tree_map(
            lambda x: x.float() if torch.is_tensor(x) and x.dtype in half else x,
            (state, args, kwargs),
        )
        with torch.autocast("{device}", enabled=False):
            result = torch.func.functional_call(inner, *wide)
        is_float = lambda x: torch.is_tensor(x) and x.is_floating_point()
        return tree_map(lambda x: x.to(emitted) if is_float(x) else x, result)
    module.forward = forward
"""
_WITHOUT_END = ("        is_float =", "        return tree_map(")
_WRAPPED = "base_model.model."


def island_lines(atoms: tuple[Atom, ...], model: str, device: str) -> list[str]:
    """Return code that has modules of ``model`` compute in float32: parameters stay as they are
    stored.

    Numbers, gradients and updates are those of the remedy. The atoms are islands; what the first
    says of the format that it emits holds for all.
    """
    lines = _LINES.replace("{device}", device).splitlines()
    if not atoms[0].value.endswith("input"):
        lines = [line for line in lines if not line.startswith((*_WITHOUT_END, "        emitted"))]
        lines = [line for line in lines if "given = " not in line]
        at = next(i for i, line in enumerate(lines) if "result = " in line)
        lines[at] = lines[at].replace("result = ", "return ")
    calls_ = [f'in_float32({model}.get_submodule("{one.target}"))' for one in atoms]
    return [*lines, "", *calls_] if atoms[0].target else [*lines, "", f"in_float32({model})"]


def with_islands(source: Source, atoms: tuple[Atom, ...], device: str) -> list[Edit]:
    """Return the edit that makes the islands right after the script's model is made.

    Empty where it is not clear what that is.
    """
    made = _model(source)
    if made is None or source.spelled("torch.float16") is None:
        return []
    name, statement, is_adapted = made
    named = tuple(
        atom
        if is_adapted
        else Atom(remedy=atom.remedy, target=atom.target.removeprefix(_WRAPPED), value=atom.value)
        for atom in atoms
    )
    torch = source.spelled("torch.nn") or "torch.nn"
    lines = island_lines(named, name, device)
    if source.imported.get("torch") != "torch" and torch:
        lines = ["import torch", *lines]
    edit = source.inserted_after(statement, lines)
    if edit is None or "def in_float32" in source.text:
        return []
    return [edit]


def _model(source: Source) -> tuple[str, ast.stmt, bool] | None:
    """Return the name of the script's only model, the statement that last makes it, and whether
    that wraps it in adapters.
    """
    classes = {
        node.name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("Module") for base in node.bases)
    }
    found: list[tuple[str, ast.stmt, bool]] = []
    for name, node in calls(source):
        owner = ast.unparse(node.func)
        loads = name in ("from_pretrained", "from_config") and "Model" in owner
        built = name in classes or name == "get_peft_model" or loads
        built = built or owner.rpartition(".")[2].endswith(("ForCausalLM", "LMHeadModel"))
        statement = source.statement_of(node)
        if built and isinstance(statement, ast.Assign) and source.indent_of(statement) is not None:
            target = statement.targets[0]
            inside = any(isinstance(one, ast.ClassDef) for one in source.around(statement))
            if isinstance(target, ast.Name) and not inside:
                found.append((target.id, statement, name == "get_peft_model"))
    names = {name for name, _, _ in found}
    return found[-1] if len(names) == 1 else None
