"""What is typed for another form of a line."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product

from nanstop.records import FORMAT_MAX, Atom, OpEvent, Proof
from nanstop.records.line_forms import (
    AND_BACK,
    BOUNDED,
    BY_ARRAY,
    BY_NUMBER,
    CARRIED_AS,
    CARRIED_MATRICES,
    COUNTED,
    EACH_AND_BACK,
    EACH_READ,
    EVERY,
    FORMS,
    FROM_FIRST,
    GUARDED,
    INNERMOST,
    KEPT,
    MASK_AFTERWARDS,
    MASKED,
    OFF_ZERO,
    OUT_OF_AUTOCAST,
    UNCAST,
    form_of,
    typed_cure,
)
from nanstop.rewrite.draft import Draft, NotKnownError
from nanstop.rewrite.files import FileChange
from nanstop.rewrite.forms.carried_logs import carried_edits
from nanstop.rewrite.forms.guarded import rewrite_guarded, rewrite_held
from nanstop.rewrite.forms.in_float32 import (
    rewrite_and_back,
    rewrite_each_read,
    rewrite_in_float32,
    rewrite_out_of_autocast,
    rewrite_uncast,
)
from nanstop.rewrite.forms.log_space import rewrite_in_log_space
from nanstop.rewrite.forms.off_zero import rewrite_off_zero
from nanstop.rewrite.forms.unwritten import rewrite_unwritten
from nanstop.rewrite.operations import beyond, infinity_of
from nanstop.rewrite.source import Edit, Source, apart, edited, expressions_of, source_of

_MOST_CODES = 5
"""Ways to type one cure that are tried."""
_ALONE = (KEPT, BOUNDED, COUNTED, MASK_AFTERWARDS, *OFF_ZERO)
"""Guarded forms that are typed in one way only."""

_SIZES = frozenset({"norm", "deviation", "magnitude", "square"})

_QUESTIONS = ("isnan", "isinf", "isfinite")


@dataclass(frozen=True, slots=True)
class FormCode:
    """``atoms``: the forms that it stands for, each of another line. ``rest``: those of the cure
    for which nothing is known that can be typed.
    """

    atoms: tuple[Atom, ...]
    files: tuple[FileChange, ...]
    rest: tuple[Atom, ...] = ()


def codes_of(
    proof: Proof, event: OpEvent | None, read: Callable[[str], str | None]
) -> Iterator[FormCode]:
    """Yield what can be typed for the forms of a cure, the forms that were proven first.

    ``read``: see ``rewrite.change``.
    """
    cure = typed_cure(proof)
    texts = {file: read(file) for file in {_place(a)[0] for a in cure if _is_form(a)}}
    sources = {file: source_of(text) for file, text in texts.items()}
    choices: list[list[tuple[Atom, str, tuple[Edit, ...]]]] = []
    rest: list[Atom] = []
    for atom in cure:
        file, source = _place(atom)[0], sources.get(_place(atom)[0])
        ways = ways_at(proof, atom) if source is not None and _is_form(atom) else ()
        known = [(one, file, edits_of(source, one, event)) for one in ways if source is not None]
        typed = [one for at, one in enumerate(known) if one[2] and not _is_among(one, known[:at])]
        choices += [typed] if typed else []
        rest += [] if typed else [atom]
    for chosen in islice(product(*choices), _MOST_CODES if choices else 0):
        edits: dict[str, list[Edit]] = {}
        for _, file, more in sorted(chosen, key=lambda one: comes_later(one[0])):
            known = edits.setdefault(file, [])
            known += apart(more, known)
        files = tuple(
            FileChange(file, texts[file] or "", edited(texts[file] or "", more))
            for file, more in edits.items()
        )
        yield FormCode(tuple(atom for atom, _, _ in chosen), files, tuple(rest))


def comes_later(atom: Atom) -> bool:
    """Return whether a form is typed only where none in log space is: that needs no guard."""
    return atom.remedy != "stable_form"


def forms_at(proof: Proof | None, atom: Atom) -> tuple[Atom, ...]:
    """Return a form of a cure, and the other forms of its line that passed: the numbers that a
    stable form is made of may come from another function.
    """
    sets = [one.atoms for one in proof.alternatives] if proof is not None else []
    sets = [] if form_of(atom)[0] in _ALONE else sets  # others give the loss another value
    alone = (one[0] for one in sets if len(one) == 1)
    return (atom, *(one for one in alone if _is_form(one) and one.target == atom.target))


def ways_at(proof: Proof | None, atom: Atom) -> tuple[Atom, ...]:
    """Return ``forms_at``, and then those that can be typed in another way as well: of every
    operation of the line where one is known to fail, of one within another, or element by element;
    of a line in float32 at its first operation, at all that it reads, and without autocast.
    """
    forms = forms_at(proof, atom)
    if atom.remedy == "fp32_line":
        form, op = form_of(atom)
        ways = (f"{FROM_FIRST}:{op}", EACH_READ, f"{OUT_OF_AUTOCAST}:{op or form}")
        ways = (EACH_AND_BACK,) if form == AND_BACK else ways
        return (atom, *(replace(atom, value=one) for one in ways), *forms[1:])
    guards = [one for one in forms if one.remedy == "form" and form_of(one)[0] not in _ALONE]
    stable = [one for one in forms if one.remedy == "stable_form"]
    carried = (replace(one, value=v) for one in stable for v in CARRIED_AS)
    whole = (replace(one, value=GUARDED) for one in guards if form_of(one)[1])
    inner = (replace(one, value=INNERMOST) for one in guards)
    masked = (replace(one, value=MASKED) for one in guards)
    every = (replace(one, value=EVERY) for one in guards)
    return (*forms, *carried, *whole, *inner, *masked, *every)


def _is_among(
    one: tuple[Atom, str, tuple[Edit, ...]], others: Iterable[tuple[Atom, str, tuple[Edit, ...]]]
) -> bool:
    return any(other[1:] == one[1:] for other in others)


def edits_of(source: Source, atom: Atom, event: OpEvent | None) -> tuple[Edit, ...]:
    """Return the edits that put a form at its line; empty where none is known."""
    file, line = _place(atom)
    at = event.source if event is not None else None
    device = _device(event)
    if at is not None and (at.file, at.line) != (file, line):
        event = None  # what fails at this line, once the other one passes, is not recorded
    return form_edits(source, line, atom, event, device)


def _is_form(atom: Atom) -> bool:
    return atom.remedy in FORMS


def _place(atom: Atom) -> tuple[str, int]:
    file, _, number = atom.target.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def form_edits(
    source: Source, line: int, atom: Atom, event: OpEvent | None, device: str = ""
) -> tuple[Edit, ...]:
    """Return the edits that put a stable or a guarded form at a line; empty where none is known.

    An exponential of one line is stable in what a later one makes of it: its logarithm, a share.
    ``event``: the failing operation, for its name, its format and what its operands are.
    ``device``: the kind of device that the line computes on, "" where that is not known.
    """
    statements = source.statements_at(line)[::-1]
    if atom.value in CARRIED_AS:
        is_matrices = atom.value == CARRIED_MATRICES
        return carried_edits(source, statements, _format(event), of_matrices=is_matrices)
    stable = atom.remedy == "stable_form"
    later = (one for at in statements for one in source.readers_of(at)) if stable else ()
    # What is typed at all operations of a line is typed in each of its statements.
    is_of_all = atom.value == EVERY or form_of(atom)[0] in (BOUNDED, KEPT)
    found: list[Edit] = []
    for place in (*statements, *later):
        draft = _draft(source, place, atom, event, device)
        with suppress(NotKnownError):
            edits = draft.finished() if _rewritten(draft, atom, _meant(atom, event), event) else ()
            found += edits
            if edits and not is_of_all:
                break
    return tuple(found)


def _draft(
    source: Source, place: ast.stmt, atom: Atom, event: OpEvent | None, device: str
) -> Draft:
    draft = Draft(source, place, _format(event), device, counted=_is_counted(event))
    is_by_number = event is not None and event.name == "div" and event.divisor is None
    draft.by_number = is_by_number or form_of(atom)[0] == BY_NUMBER
    draft.by_array = form_of(atom)[0] == BY_ARRAY
    draft.masked, draft.innermost = atom.value == MASKED, atom.value == INNERMOST
    draft.kept, draft.bounded = (form_of(atom)[0] == one for one in (KEPT, BOUNDED))
    draft.least = _least_of_root(event)
    draft.infinite = event is not None and any(o.posinf or o.neginf for o in event.outputs)
    draft.of_size = _is_size(event)
    read = event.inputs if event is not None else ()
    hiding = [at for at, one in enumerate(read) if one.neginf]
    draft.hiding = hiding[0] if len(hiding) == 1 else None
    return draft


def _rewritten(draft: Draft, atom: Atom, op: str, event: OpEvent | None) -> bool:
    if atom.remedy == "memory_fill":
        return rewrite_unwritten(draft)
    if atom.remedy == "held_fill":
        return rewrite_held(draft)
    if atom.remedy == "finite_fill":
        return _in_finite(draft, atom.value)
    if atom.remedy == "finite_constant":
        return _read_finite(draft, *form_of(atom), event)
    if atom.remedy == "fp32_line":
        return _in_float32(draft, form_of(atom)[0], op)
    if atom.remedy == "stable_form":
        return rewrite_in_log_space(draft)
    if form_of(atom)[0] in OFF_ZERO:
        return rewrite_off_zero(draft, op)
    return rewrite_guarded(draft, op)


def _in_float32(draft: Draft, form: str, op: str) -> bool:
    if form == OUT_OF_AUTOCAST:
        return rewrite_out_of_autocast(draft, op)
    if form == EACH_READ:
        return rewrite_each_read(draft)
    if form in (AND_BACK, EACH_AND_BACK):
        return rewrite_and_back(draft, op if form == AND_BACK else "")
    return rewrite_uncast(draft) if form == UNCAST else rewrite_in_float32(draft, op)


def _device(event: OpEvent | None) -> str:
    devices = [stats.device for stats in event.inputs] if event is not None else []
    return devices[0].partition(":")[0] if devices else ""


def _meant(atom: Atom, event: OpEvent | None) -> str:
    """Return which operation of its line a form is typed at, "" for all."""
    form, op = form_of(atom)
    if form == MASK_AFTERWARDS:
        return "mul"
    if form in (FROM_FIRST, OUT_OF_AUTOCAST, AND_BACK):
        return op
    return "" if form == EVERY else _name(event) or op


def _format(event: OpEvent | None) -> str:
    formats = [stats.dtype for stats in event.inputs] if event is not None else []
    return next((name for name in formats if "float" in name), "float32")


def _name(event: OpEvent | None) -> str:
    if event is None:
        return ""
    forward = event.forward_op or ""
    op = forward if "." in forward else event.op  # a custom backward is a line of its own
    return op.split(".")[1].rstrip("_").removeprefix("special_")


def _least_of_root(event: OpEvent | None) -> float:
    """Return the least number other than 0 of which a square root, or its derivative, was taken,
    inf where all are 0; 0 where it is not known. The derivative is divided by two roots, that of a
    power reads what that is of.
    """
    if event is None or not event.inputs:
        return 0.0
    is_derivative = event.forward_op is not None
    if event.name == "pow" and event.scalars[-1:] == ((-0.5,) if is_derivative else (0.5,)):
        is_derivative = False
    elif _name(event) != "sqrt" or (is_derivative and event.name != "div"):
        return 0.0
    read = event.inputs[-1 if is_derivative else 0]
    least = read.absmin_nonzero or (math.inf if read.zeros else 0.0)
    return (least / 2.0) ** 2 if is_derivative else least


def _is_size(event: OpEvent | None) -> bool:
    """Return whether the failing operation divides by what descends from magnitudes."""
    place = event.divisor if event is not None else None
    if event is None or place is None or place >= len(event.descent):
        return False
    return not _SIZES.isdisjoint(event.descent[place])


def _is_counted(event: OpEvent | None) -> bool:
    return event is not None and (event.divides_by_count or event.reads_whole)


def _in_finite(draft: Draft, number: str) -> bool:
    """Return whether infinities that the statement spells could be rewritten as ``number`` or its
    opposite, or else those of the one that gives a name its value which it reads; the draft holds
    it.
    """
    if _spell_finite(draft, draft.statement, number):
        return True
    scope, begin = draft.source.scope_of(draft.statement), draft.statement.lineno
    read = [node for root in expressions_of(draft.statement) for node in ast.walk(root)]
    loaded = [one for one in read if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    names = {one.id for one in loaded}
    given = [
        one
        for one in ast.walk(scope)
        if isinstance(one, ast.Assign) and names & {ast.unparse(to) for to in one.targets}
    ]
    before = [one for one in given if one.lineno < begin]
    return len(given) == len(before) == 1 and _spell_finite(draft, before[0], number)


def _spell_finite(draft: Draft, statement: ast.stmt, number: str) -> bool:
    """Return whether a statement spells infinities, in words or by a number beyond the format; the
    draft holds ``number`` in their place.
    """
    taken, most = set[int](), FORMAT_MAX.get(draft.dtype, math.inf)
    for root in expressions_of(statement):
        for node in ast.walk(root):
            value = infinity_of(draft.source, node) or beyond(node, most)
            if value is None or not isinstance(node, ast.expr) or id(node) in taken:
                continue
            taken.update(id(one) for one in ast.walk(node))
            text = "0.0" if not float(number) else number if value > 0.0 else f"-{number}"
            draft.edits.append(Edit(*draft.source.span(node), text))
    return bool(taken)


def _read_finite(draft: Draft, number: str, name: str, event: OpEvent | None) -> bool:
    """Return whether what the statement reads by ``name``, or as an attribute of that name, could
    be read with ``number`` where it is not finite; the draft holds it.

    A function has its own name for what it is given: then it is what ``event`` read so.
    """
    nodes = [node for root in expressions_of(draft.statement) for node in ast.walk(root)]
    named = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute)]
    named = [node for node in named if isinstance(node.ctx, ast.Load)]
    read = [one for one in named if name in (ast.unparse(one), getattr(one, "attr", ""))]
    if not read:
        taken = _taken_from(draft, name)
        read = [one for one in named if ast.unparse(one) in taken]
    read = read or [one for one in _read_so(draft, event) if one in named]
    read = [one for one in read if not _is_asked(draft, one)]
    for node in read:
        text = draft.source.segment(node)
        draft.edits.append(Edit(*draft.source.span(node), f"{text}{finite_call(number)}"))
    return bool(read)


def _read_so(draft: Draft, event: OpEvent | None) -> Iterator[ast.expr]:
    """Yield the operands of the failing operation that were not finite when it read them."""
    meant = [one for one in draft.operations() if one.name == _name(event)]
    if event is None or len(meant) != 1 or len(meant[0].args) != len(event.inputs):
        return
    for node, stats in zip(meant[0].args, event.inputs, strict=True):
        if not stats.finite:
            yield node


def _taken_from(draft: Draft, name: str) -> set[str]:
    """Return the names that the file gives what it takes out of a variable: its rows, say."""
    found: set[str] = set()
    for node in ast.walk(draft.source.tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        found |= {
            one.id
            for one, made in pairs
            if isinstance(one, ast.Name) and isinstance(made, ast.Subscript)
            if ast.unparse(made.value) == name
        }
    return found


def _is_asked(draft: Draft, node: ast.expr) -> bool:
    """Return whether a value is only asked whether it is finite, or what it is compared to."""
    parent = draft.source.parents.get(node)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _QUESTIONS
    named = isinstance(parent, ast.Call) and ast.unparse(parent.func).rpartition(".")[2]
    return isinstance(parent, ast.Compare) or named in _QUESTIONS


def finite_call(number: str) -> str:
    """Return what is typed behind a constant to have ``number`` where it is not finite; a large one
    stands for a mask's -Inf.
    """
    if float(number):
        return f".clamp(min=-{number})"
    return ".nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)"
