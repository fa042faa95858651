"""One line of a script, or of the library that it calls, computed in another form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from nanstop.errors import NanstopError
from nanstop.own_code import is_own, lies_in
from nanstop.records import Atom
from nanstop.records.line_forms import (
    AND_BACK,
    BOUNDED,
    CARRIED_AS,
    COUNTED,
    EACH_AND_BACK,
    EACH_READ,
    EVERY,
    FAR,
    FINITE_NUMBERS,
    FROM_FIRST,
    GUARDED,
    INNERMOST,
    KEPT,
    MASK_AFTERWARDS,
    MASK_FAR,
    MASKED,
    OFF_ZERO,
    OTHER_BOUND,
    OTHER_COUNT,
    OTHERWISE,
    OUT_OF_AUTOCAST,
    UNCAST,
    UNEVEN,
    form_of,
)
from nanstop.remedies.forms import bounds, guarded, held, unwritten, wide
from nanstop.remedies.forms.calls import Call, line_in
from nanstop.remedies.forms.comparison import Comparison
from nanstop.remedies.forms.held import Form
from nanstop.remedies.forms.limits import OffZero, Zeros
from nanstop.remedies.forms.logs.log_space import LogSpace
from nanstop.replay.conditions import eager
from nanstop.replay.function_modes import OwnMode, in_engine, on_stack
from nanstop.replay.step import ModelView

_BACKWARDS = ("backward", "grad")
"""Of ``Tensor`` and of ``torch.autograd``; a property's getter is called ``__get__``."""

_FORMS: Mapping[str, Callable[[], Form]] = {
    **dict.fromkeys(("log_space", *CARRIED_AS), lambda: LogSpace().call),
    "held": lambda: held.answer,
    **{number: partial(held.finite_of, float(number)) for number in FINITE_NUMBERS},
    UNCAST: lambda: wide.uncast,
    **dict.fromkeys((AND_BACK, EACH_AND_BACK), lambda: wide.AndBack().answer),
    **dict.fromkeys(("float32", FROM_FIRST, EACH_READ, OUT_OF_AUTOCAST), lambda: wide.answer),
    **dict.fromkeys((GUARDED, EVERY, INNERMOST, MASKED), lambda: guarded.answer),
    KEPT: lambda: guarded.kept,
    FAR: lambda: partial(guarded.kept, is_far=True),
    OTHERWISE: lambda: guarded.otherwise,
    MASK_AFTERWARDS: lambda: guarded.masked_product,
    MASK_FAR: lambda: partial(guarded.masked_product, is_far=True),
    BOUNDED: lambda: bounds.answer,
    OTHER_BOUND: lambda: partial(bounds.answer, is_other=True),
    COUNTED: lambda: bounds.counted,
    OTHER_COUNT: lambda: partial(bounds.counted, is_other=True),
}

_PUT_THERE = (*FINITE_NUMBERS, UNEVEN)


class LineMode(OwnMode):
    """Answers calls of torch's functions."""

    def __init__(self, answer: Callable[[Call], Any]) -> None:
        super().__init__()
        self._answer = answer

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") in _BACKWARDS:
            with in_engine(self):  # activation checkpointing makes calls of the forward again there
                return func(*args, **kwargs)
        return self._answer(Call.of(func, args, kwargs))


@contextmanager
def answered(answer: Callable[[Call], Any]) -> Iterator[None]:
    """Have calls of torch's functions answered inside. Compiled code runs eagerly: it has no lines,
    and would be compiled anew to see a mode.
    """
    with eager(), on_stack(LineMode(answer)):
        yield


def _at(file: str, line: int, form: Form) -> Callable[[Call], Any]:
    """Return what answers calls that are made by one line in another form."""

    def at_line() -> bool:
        return line_in(file) == line

    return lambda call: form(call, at_line)


@contextmanager
def form(_view: ModelView, atom: Atom) -> Iterator[None]:
    """Have the line ``atom.target`` ("file:line") computed in the form ``atom.value`` inside.

    Elements that had a finite value keep it: in "log_space" it is the same function, "guarded"
    gives a value to what had none. Costs a call of Python for each of torch's functions. Raises
    NanstopError for a form that there is not, and for a target that is no line.
    """
    file, line = _line_of(atom, (*_FORMS, *OFF_ZERO))
    by, _ = form_of(atom)
    known = _at(file, line, _FORMS[by]()) if by in _FORMS else _off_zero(file, line, OFF_ZERO[by])
    with answered(known):
        yield


def _off_zero(file: str, line: int, by: float) -> Callable[[Call], Any]:
    moved = OffZero(by)
    return lambda call: moved.answer(call, _line_alone(file, call), line)


@contextmanager
def finite_constant(_view: ModelView, atom: Atom) -> Iterator[None]:
    """Have what the line ``atom.target`` reads of tensors without a gradient, and is not finite, be
    ``atom.value`` inside, or for -Inf its opposite. Raises what ``form`` does.
    """
    file, line = _line_of(atom, _PUT_THERE)
    with answered(_at(file, line, held.constants_as(form_of(atom)[0]))):
        yield


@contextmanager
def memory_fill(_view: ModelView, atom: Atom) -> Iterator[None]:
    """Have the number ``atom.value`` wherever the line ``atom.target`` leaves memory unwritten
    inside. Raises what ``form`` does.
    """
    file, line = _line_of(atom, _PUT_THERE)
    with answered(_at(file, line, unwritten.filled_with(form_of(atom)[0]))):
        yield


@contextmanager
def compared(atom: Atom) -> Iterator[Comparison]:
    """Have every call of the line that ``form`` would guard made in both ways inside, and compared.

    Raises what ``form`` does.
    """
    file, line = _line_of(atom, (*_FORMS, *OFF_ZERO))
    found = Comparison()
    chosen: Mapping[str, Form] = {BOUNDED: bounds.answer, COUNTED: bounds.counted}
    chosen = {**chosen, MASK_AFTERWARDS: guarded.masked_product}
    by = chosen.get(form_of(atom)[0], guarded.answer)
    with answered(_at(file, line, partial(_in_both, found, by))):
        yield found


@contextmanager
def zeros_noted(atoms: Iterable[Atom]) -> Iterator[Mapping[str, Zeros]]:
    """Note what is 0 inside where the lines have no value, by file. Raises what ``form`` does."""
    lines: dict[str, set[int]] = {}
    for file, line in (_line_of(atom, (*_FORMS, *OFF_ZERO)) for atom in atoms):
        lines.setdefault(file, set()).add(line)
    found = {file: Zeros() for file in lines}
    with ExitStack() as scope:
        for file, zeros in found.items():
            noting = partial(_noted, zeros, file, lines[file])
            scope.enter_context(answered(noting))
        yield found


def _noted(zeros: Zeros, file: str, lines: set[int], call: Call) -> Any:
    return zeros.look(call, _line_alone(file, call), lines)


@contextmanager
def zeros_moved(noted: Mapping[str, Zeros], by: float) -> Iterator[None]:
    """Have ``by`` inside in place of what was noted to be 0, wherever its file reads it."""
    with ExitStack() as scope:
        for file, zeros in noted.items():
            moving = partial(_moved, Zeros(), file, frozenset(zeros.found), by)
            scope.enter_context(answered(moving))
        yield


def _moved(zeros: Zeros, file: str, numbers: frozenset[int], by: float, call: Call) -> Any:
    return zeros.moved(call, _line_alone(file, call), numbers, by)


def _line_alone(file: str, call: Call) -> int | None:
    """Return the line of a file that makes a call itself, or by a function of torch; None for what
    nanstop computes beneath one, which no two runs have alike.

    What lies between is modes that hand it on: each was given the same function.
    """
    frame, asked, is_handed_on = sys._getframe(1), OwnMode.__torch_function__.__code__, True
    name = getattr(call.function, "__name__", "")
    while frame.f_back is not None:
        code, place = frame.f_code, frame.f_code.co_filename
        if place == file:
            return frame.f_lineno if is_handed_on else None
        if code is asked:
            is_handed_on = getattr(frame.f_locals["func"], "__name__", "") == name
            if not is_handed_on:
                return None
        elif is_own(place):
            is_handed_on = False
        elif not lies_in(place, "torch"):
            return None
        frame = frame.f_back
    return frame.f_lineno if frame.f_code.co_filename == file and is_handed_on else None


def _in_both(found: Comparison, by: Form, call: Call, at_line: Callable[[], bool]) -> Any:
    def guard(given: Call) -> Any:
        return by(given, lambda: True)

    is_meant = guarded.is_guarded(call) or (by is guarded.masked_product and call.name == "mul")
    if is_meant and at_line():
        found.look(call, guard)
        return guard(call)
    return call.run()


def _line_of(atom: Atom, known: Iterable[str] = _FORMS) -> tuple[str, int]:
    file, _, number = atom.target.rpartition(":")
    if form_of(atom)[0] not in known:
        raise NanstopError(f"{atom}: unknown form", hint=f"one of: {', '.join(known)}")
    if not file or not number.isdecimal():
        raise NanstopError(f"{atom}: `{atom.target}` is not a line of a file")
    return file, int(number)
