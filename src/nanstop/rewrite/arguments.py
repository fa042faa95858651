"""Cures that are arguments: of a training's configuration, an optimizer, the loading of a model."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

from nanstop.records import Atom, RunFacts, SourceLine
from nanstop.rewrite.definitions import definition
from nanstop.rewrite.operations import number_of
from nanstop.rewrite.rates import is_set_since, of_groups, parameters_given, set_anew
from nanstop.rewrite.source import Edit, Source

Settings = Mapping[str, str | bool | float]

_CONFIGS = frozenset(
    {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig"}
    | {"RewardConfig", "KTOConfig", "RLOOConfig", "ORPOConfig", "CPOConfig", "PPOConfig"}
    | {"OnlineDPOConfig", "GKDConfig", "PRMConfig"}
)
_OPTIMIZERS = frozenset({"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop"})
_OPTIMIZERS |= {"Adafactor", "Lion", "AdamW8bit", "Adam8bit", "PagedAdamW8bit", "Adadelta"}
_NUMBERS = {"clip": "max_grad_norm", "optimizer_eps": "adam_epsilon"}
_NUMBERS |= {"weight_decay": "weight_decay"}
_OF_OPTIMIZER = {"learning_rate": "lr", "adam_epsilon": "eps", "weight_decay": "weight_decay"}
_PLACES = {"lr": 1}
"""Where an optimizer is given its rate by place."""
_SCALERS_OF_A_DEVICE = ("cuda.amp.GradScaler", "cpu.amp.GradScaler")
"""Others are given the device first."""
_NOT_MODELS = ("Tokenizer", "Processor", "Config", "FeatureExtractor")
_FORMAT = ("dtype", "torch_dtype")
_HALF = ("float16", "half")


def settings_of(atom: Atom, facts: RunFacts) -> Settings:
    """Return what a remedy is in a training's configuration, by its keys; empty for what is none.

    ``dtype`` and ``attn_implementation`` are of the model's loading. A factor of the learning rate
    counts from the rate that the run was set up with.
    """
    if atom.remedy == "bf16":
        return {"fp16": False, "bf16": True}
    if atom.remedy in _NUMBERS:
        return {_NUMBERS[atom.remedy]: float(atom.value)}
    if atom.remedy == "optimizer_swap":
        return {} if comes_back(facts) else {"optim": "adamw_torch"}
    if atom.remedy == "attention":
        return {"attn_implementation": atom.value}
    if atom.remedy == "fp32_trainables":
        return {"dtype": "float32"}
    rate = facts.optimizer.scheduled or facts.optimizer.lr if facts.optimizer is not None else None
    if atom.remedy == "lr" and rate:
        return {"learning_rate": scaled(rate, atom)}
    return {}


def comes_back(facts: RunFacts) -> bool:
    """Return whether the optimizer's state was at fault as it was restored: whatever optimizer a
    script names, it restores the same state again.
    """
    return facts.optimizer is not None and bool(facts.optimizer.state_faults)


def scaled(rate: float, atom: Atom) -> float:
    """Return a learning rate times the remedy's factor, without digits of rounding."""
    return float(f"{rate * float(atom.value):.6g}")


def given_to(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return what a call is given by this keyword, or in this place."""
    named = (one.value for one in call.keywords if one.arg == name)
    placed = call.args[place : place + 1] if place is not None else []
    return next(named, placed[0] if placed else None)


def with_keyword(
    source: Source, call: ast.Call, name: str, value: str, place: int | None = None
) -> list[Edit]:
    """Return the edits that give a call this keyword, or what is in its ``place``; none where it
    has it already.
    """
    given = given_to(call, name, place)
    if given is not None:
        return [] if source.segment(given) == value else [Edit(*source.span(given), value)]
    end = source.span(call)[1] - 1
    last = max((source.span(one)[1] for one in (*call.args, *call.keywords)), default=None)
    if last is None:
        return [Edit(end, end, f"{name}={value}")]
    between = source.text[last:end]
    if "," not in between.partition("#")[0]:
        return [Edit(last, last, f", {name}={value}")]
    if "\n" not in between:
        return [Edit(end, end, f" {name}={value}" if between.endswith(",") else f"{name}={value}")]
    indent = _indent_of_last(source, call)
    at = last + between.index(",") + 1
    return [Edit(at, at, f"{source.newline(call.lineno)}{indent}{name}={value},")]


def _indent_of_last(source: Source, call: ast.Call) -> str:
    last = max((*call.args, *call.keywords), key=lambda one: source.span(one)[0])
    line = source.line(last.lineno)
    return line[: len(line) - len(line.lstrip())]


def cured(source: Source, atom: Atom, facts: RunFacts) -> list[Edit]:
    """Return the edits of a script that are this remedy; empty where it has no place for it."""
    made = _BY_REMEDY.get(atom.remedy)
    return made(source, atom, facts) if made is not None else []


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of the file with the last word of what it calls, in the text's order."""
    found = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    for node in sorted(found, key=lambda one: (one.lineno, one.col_offset)):
        full = source.qualified(node.func) or ast.unparse(node.func)
        yield full.rpartition(".")[2], node


def _configs(source: Source) -> list[ast.Call]:
    return [node for name, node in calls(source) if name in _CONFIGS]


def _optimizers(source: Source) -> list[ast.Call]:
    made = (node for name, node in calls(source) if name in _OPTIMIZERS)
    return [one for one in made if parameters_given(one) is not None]


def _made_at(source: Source, made: list[ast.Call], at: SourceLine | None) -> list[ast.Call]:
    """Return of some calls the one that a line of the run is in; all where none is."""
    if at is None or not at.text.strip() or source.line(at.line).strip() != at.text.strip():
        return made
    return [one for one in made if one.lineno <= at.line <= (one.end_lineno or 0)] or made


def _set(source: Source, atom: Atom, facts: RunFacts) -> list[Edit]:
    """Put a setting into the configuration, or into the optimizer that the script makes itself."""
    edits: list[Edit] = []
    if atom.remedy == "lr" and is_set_since(facts.optimizer):
        by_hand = set_anew(source, lambda value: _text(source, value, atom, ""))
        if by_hand is not None:
            return by_hand
    optimizers = _made_at(source, _optimizers(source), facts.optimizer_at)
    own = any(key in _OF_OPTIMIZER for key in settings_of(atom, facts)) and optimizers
    for call in optimizers if own else _configs(source):
        for key, value in settings_of(atom, facts).items():
            name = _OF_OPTIMIZER[key] if own else key
            place = _PLACES.get(name) if own else None
            if own and place is None and len(call.args) > 1 + max(_PLACES.values()):
                continue  # which of the others stands where hangs on the optimizer
            in_groups, is_all = of_groups(source, call, name) if own else ([], False)
            edits += [Edit(*source.span(one), _text(source, one, atom, value)) for one in in_groups]
            if is_all:
                continue
            given = given_to(call, name, place)
            edits += with_keyword(source, call, name, _text(source, given, atom, value), place)
    return edits


def _text(source: Source, given: ast.expr | None, atom: Atom, value: str | bool | float) -> str:
    """Return a value as code; a learning rate that is ``given`` there times the factor."""
    if atom.remedy != "lr" or given is None:
        return literal(value)
    number = number_of(given)
    if number is not None:
        return literal(scaled(number, atom))
    return f"{source.operand(given)} * {atom.value}"


def literal(value: str | bool | float) -> str:
    """Return a value as Python spells it."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _bf16(source: Source, _atom: Atom, _facts: RunFacts) -> list[Edit]:
    """Put bfloat16 wherever the script says float16."""
    edits: list[Edit] = []
    for call in _configs(source):
        if any(one.arg == "fp16" for one in call.keywords):
            edits += with_keyword(source, call, "fp16", "False")
            edits += with_keyword(source, call, "bf16", "True")
    return [*edits, *_formats(source, "bfloat16")]


def _formats(source: Source, name: str) -> list[Edit]:
    edits: list[Edit] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            full = source.qualified(node)
            if full in {f"torch.{half}" for half in _HALF} and isinstance(node, ast.Attribute):
                start, end = source.span(node)
                edits.append(Edit(end - len(node.attr), end, name))
        elif isinstance(node, ast.keyword) and node.arg in (*_FORMAT, "mixed_precision"):
            known = node.value.value if isinstance(node.value, ast.Constant) else None
            other = {"float16": name, "fp16": "bf16" if name == "bfloat16" else "no"}
            if isinstance(known, str) and known in other:
                edits.append(Edit(*source.span(node.value), f'"{other[known]}"'))
        elif _is_method(source, node, "half"):
            assert isinstance(node, ast.Call)
            assert isinstance(node.func, ast.Attribute)
            start, end = source.span(node.func.value)[1], source.span(node)[1]
            edits.append(Edit(start, end, ".float()" if name == "float32" else f".{name}()"))
    return edits


def _is_method(source: Source, node: ast.AST, name: str) -> bool:
    func = node.func if isinstance(node, ast.Call) and not node.args else None
    return isinstance(func, ast.Attribute) and func.attr == name and not source.qualified(func)


def _loading(source: Source) -> list[ast.Call]:
    """Return the calls that load or build a model of a library."""
    found = []
    for name, node in calls(source):
        if name in ("from_pretrained", "from_config") and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if not owner.endswith(_NOT_MODELS):
                found.append(node)
    return found


def _fp32_trainables(source: Source, _atom: Atom, _facts: RunFacts) -> list[Edit]:
    """Load the model in float32."""
    edits: list[Edit] = []
    for call in _loading(source):
        for given in (one for one in call.keywords if one.arg in _FORMAT):
            is_text = isinstance(given.value, ast.Constant)
            value = '"float32"' if is_text else source.spelled("torch.float32") or '"float32"'
            edits += with_keyword(source, call, str(given.arg), value)
    return edits or [edit for edit in _formats(source, "float32") if ".float()" in edit.text]


def _attention(source: Source, atom: Atom, _facts: RunFacts) -> list[Edit]:
    named = [
        (node, one.arg)
        for _, node in calls(source)
        for one in node.keywords
        if one.arg in ("attn_implementation", "_attn_implementation")
    ]
    pairs = named or [(node, "attn_implementation") for node in _loading(source)]
    value = literal(atom.value)
    return [edit for node, name in pairs for edit in with_keyword(source, node, str(name), value)]


def _sdpa_kernel(source: Source, atom: Atom, _facts: RunFacts) -> list[Edit]:
    """Have torch not choose a kernel of attention, in a line after the imports."""
    function = f"torch.backends.cuda.enable_{atom.value}_sdp"
    imports = [one for one in source.tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    known = source.spelled(function)
    if not imports or any(source.qualified(node.func) == function for _, node in calls(source)):
        return []
    lines = (f"{known}(False)",) if known is not None else ("import torch", f"{function}(False)")
    edit = source.inserted_after(imports[-1], lines)
    return [edit] if edit is not None else []


def _eager(source: Source, _atom: Atom, _facts: RunFacts) -> list[Edit]:
    """Take what compiles off: a call, a decorator, a training's argument."""
    around = {
        node
        for one in ast.walk(source.tree)
        for node in getattr(one, "decorator_list", ())
        if _compiles(source, node)
    }
    edits = [Edit(*source.span(node), "torch.compiler.disable") for node in around]
    for _, node in calls(source):
        if _compiles(source, node) and node.args and node not in around:
            edits.append(Edit(*source.span(node), source.segment(node.args[0])))
        if any(one.arg == "torch_compile" for one in node.keywords):
            edits += with_keyword(source, node, "torch_compile", "False")
    for node in ast.walk(source.tree):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and _compiles_itself(source, call.func):
            edits += with_keyword(source, call, "backend", '"eager"')
    return edits


def _compiles_itself(source: Source, called: ast.expr) -> bool:
    """Return whether this is ``compile`` of a value, as in ``model.compile()``."""
    if not isinstance(called, ast.Attribute) or called.attr != "compile":
        return False
    return source.is_value(called.value)


def _compiles(source: Source, node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    return source.qualified(called) == "torch.compile"


def _unscale(source: Source, atom: Atom, _facts: RunFacts) -> list[Edit]:
    """Take the number off the loss again: where it stands ahead of ``backward``, else where the
    script multiplies something by it, if it does so once.
    """
    owners = [
        node.func.value
        for name, node in calls(source)
        if name == "backward" and isinstance(node.func, ast.Attribute)
    ]
    factor = float(atom.value)
    found = [_unscaled(source, node, factor, apart=1) for node in owners]
    if not any(found):
        found = [_unscaled(source, node, factor) for node in ast.walk(source.tree)]
        found = found if sum(map(bool, found)) == 1 else []
    return [edit for edits in found for edit in edits]


def _unscaled(source: Source, node: ast.AST, factor: float, apart: int = 0) -> list[Edit]:
    """Return the edit that leaves a factor out of a product, and ``apart`` characters on each side
    of it; none where that is no such product.
    """
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult) and not apart:
        is_it = _number(source, node.value) == factor
        return [Edit(*source.span(node), "pass")] if is_it else []
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return []
    sides = ((node.left, node.right), (node.right, node.left))
    rest = [other for one, other in sides if _number(source, one) == factor]
    start, end = source.span(node)
    return [Edit(start - apart, end + apart, source.operand(rest[0]))] if rest else []


def _number(source: Source, node: ast.expr) -> float | None:
    """Return the number that stands in an expression, or that its name was given."""
    if isinstance(node, ast.Name):
        given = definition(source, node, source.statement_of(node))
        return number_of(given.value) if given is not None else None
    return number_of(node)


def _clip(source: Source, atom: Atom, facts: RunFacts) -> list[Edit]:
    """Set ``max_grad_norm``; in a loop, the limit that it has, or a line before the update."""
    if _configs(source):
        return _set(source, atom, facts)
    limit = literal(float(atom.value))
    clipping = [node for name, node in calls(source) if name == "clip_grad_norm_"]
    if clipping:
        given = [node for node in clipping if len(node.args) > 1]
        edits = [Edit(*source.span(node.args[1]), limit) for node in given]
        bare = [node for node in clipping if len(node.args) == 1]
        return [*edits, *(e for c in bare for e in with_keyword(source, c, "max_norm", limit))]
    made = {_assigned_to(source, node): node.args[0] for node in _optimizers(source)}
    function = source.spelled("torch.nn.utils.clip_grad_norm_")
    found = []
    for name, node in calls(source):
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        weights = made.get(ast.unparse(owner)) if name == "step" and owner is not None else None
        if not isinstance(weights, ast.Call) or function is None:
            continue
        line = f"{function}({source.segment(weights)}, {limit})"
        found.append(source.inserted_before(source.statement_of(node), (line,)))
    return [edit for edit in found if edit is not None]


def _assigned_to(source: Source, node: ast.Call) -> str:
    statement = source.parents[node]
    return ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


def _loss_scale(source: Source, atom: Atom, facts: RunFacts) -> list[Edit]:
    if not facts.scaler:
        return []
    scale = repr(facts.scaler * float(atom.value))
    edits: list[Edit] = []
    for name, node in calls(source):
        if name == "GradScaler":
            of_device = (source.qualified(node.func) or "").endswith(_SCALERS_OF_A_DEVICE)
            edits += with_keyword(source, node, "init_scale", scale, 0 if of_device else 1)
    return edits


def _optimizer_swap(source: Source, atom: Atom, facts: RunFacts) -> list[Edit]:
    edits: list[Edit] = []
    if comes_back(facts):
        return edits
    plain = {"lr", "betas", "eps", "weight_decay", "params"}
    for call in _optimizers(source):
        known = {one.arg for one in call.keywords} <= plain and len(call.args) <= 2
        name = source.spelled("torch.optim.AdamW")
        if known and name is not None and source.segment(call.func) != name:
            edits.append(Edit(*source.span(call.func), name))
    return edits or _set(source, atom, facts)


_BY_REMEDY: Mapping[str, Callable[[Source, Atom, RunFacts], list[Edit]]] = {
    "bf16": _bf16,
    "clip": _clip,
    "unscale": _unscale,
    "lr": _set,
    "optimizer_eps": _set,
    "weight_decay": _set,
    "optimizer_swap": _optimizer_swap,
    "attention": _attention,
    "sdpa_kernel": _sdpa_kernel,
    "eager": _eager,
    "fp32_trainables": _fp32_trainables,
    "loss_scale": _loss_scale,
}
