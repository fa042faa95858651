"""What a script's own code remembers besides its modules: objects that count calls, lists that
hooks append to, variables of closures, classes and files.

Whoever runs a forward again runs that code again. What it may change is found from where a forward
starts: attributes and hooks of modules, and from there objects of the script's own classes, what
its functions read, and what is in containers. Objects of libraries are not looked into.
"""

from __future__ import annotations

import copy
import dis
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from itertools import count, islice, repeat
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.own_code import is_class_of_library, is_library, is_own
from nanstop.replay import state_diff
from nanstop.replay.conditions import unwarned
from nanstop.replay.rng import generators_kept, is_generator

_MOST = 20_000
"""Objects that are looked at."""
_MOST_ITEMS = 256
"""Of a container that is looked into: what holds more of them is data."""
_MOST_PLACES = 256
"""Entries that are noted in each step."""
_PLAIN = (str, bytes, int, float, complex, Tensor)
_OF_MODULES = frozenset({"_parameters", "_buffers"})
_BOOKS_OF_MODULES = frozenset(vars(nn.Module()))
_COPIED = frozenset(map(type, (count(), repeat(0), iter([]), iter(()), iter(range(0)))))
"""Iterators whose copies give what they would have given. Those inside of lists and tuples are not
replaced by theirs.
"""


@contextmanager
def script_objects_kept(roots: Iterable[Any], called: Iterable[Any] = ()) -> Iterator[None]:
    """Have what calls of ``roots`` and of ``called`` may change in the script's own objects on
    exit as it is now; not the attributes of ``roots`` themselves. No device work but copies of
    small tensors.
    """
    roots = list(roots)
    walk = _Walk(roots, called)
    own = (vars(root) for root in roots if hasattr(root, "__dict__"))
    with (
        generators_kept(walk.generators),
        state_diff.kept(walk.tables),
        _counted_apart((*walk.tables, *own)),
    ):
        yield


def reaches_iterator(roots: Iterable[Any], called: Iterable[Any] = ()) -> bool:
    """Return whether calls of ``roots`` and of ``called`` may come to an iterator that has no copy:
    what it has given nobody puts back.
    """
    return _Walk(list(roots), called).reaches_iterator


def remembered(roots: Iterable[Any], called: Iterable[Any] = ()) -> MutableMapping[str, Any]:
    """Return what calls of ``roots`` and of ``called`` may change in the script's own objects, as
    one table: containers and tensors, and numbers where something writes to their places. Not the
    attributes of ``roots`` themselves.
    """
    walk = _Walk(list(roots), called)
    places = ((t, name) for t in walk.tables for name, v in t.items() if _may_change(t, name, v))
    return _Places(islice(places, _MOST_PLACES))


def _may_change(table: MutableMapping[Any, Any], name: Any, value: Any) -> bool:
    if isinstance(value, dict | list | set | deque | Tensor):
        return not (isinstance(name, str) and name in _BOOKS_OF_MODULES)
    is_number = value is None or isinstance(value, int | float)
    return is_number and (not isinstance(table, _Variables) or table.writes(name))


def reached(called: Any) -> tuple[list[nn.Module], list[Tensor], list[Optimizer]]:
    """Return the modules that a call may come to, none of them a part of another one, the tensors
    that are no module's, and optimizers.
    """
    walk = _Walk([], [called])
    parts = {id(part) for one in walk.modules for part in one.modules() if part is not one}
    modules = [one for one in walk.modules if id(one) not in parts]
    return modules, walk.tensors, walk.optimizers


@contextmanager
def _counted_apart(tables: Iterable[MutableMapping[Any, Any]]) -> Iterator[None]:
    """Have copies of iterators in tables inside, where these can be copied."""
    places = [(t, name, one) for t in tables for name, one in t.items() if type(one) in _COPIED]
    with unwarned():  # Python 3.12 warns of a copy of a count
        for table, name, one in places:
            table[name] = copy.copy(one)
    try:
        yield
    finally:
        for table, name, one in places:
            table[name] = one


class _Walk:
    """Collects what can be changed: ``tables`` of names and values, random ``generators``,
    ``tensors`` that are no module's; the ``modules`` and ``optimizers`` among what it comes to.

    A container is noted with the table that it is an entry of.
    """

    def __init__(self, roots: list[Any], called: Iterable[Any]) -> None:
        self.tables: list[MutableMapping[Any, Any]] = []
        self.generators: list[Any] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.tensors: list[Tensor] = []
        self.reaches_iterator = False
        seen = {id(root): root for root in roots}  # held: an id is of what lives
        pending = [*called, *(held for root in roots for held in _attributes(root))]
        while pending and len(seen) < _MOST + len(roots):
            one = pending.pop()
            if one is not None and not isinstance(one, _PLAIN) and id(one) not in seen:
                seen[id(one)] = one
                pending += self._held(one)
                if isinstance(one, nn.Module):
                    self.modules.append(one)
                elif isinstance(one, Optimizer):
                    self.optimizers.append(one)
            elif isinstance(one, Tensor):
                self.tensors.append(one)

    def _held(self, one: Any) -> Iterable[Any]:
        """Note what can be changed about an object; return what it leads to."""
        held: Iterable[Any] = ()
        match one:
            case dict():
                own = dict.values(one)  # methods of its own class may load what they give
                held = own if len(own) <= _MOST_ITEMS else ()
            case list() | tuple() | set() | frozenset() | deque():
                held = one if len(one) <= _MOST_ITEMS else ()
            case partial():
                held = (one.func, *one.args, *one.keywords.values())
            case MethodType():
                held = (one.__self__, one.__func__)
            case FunctionType():
                held = self._read_by(one)
            case ref():
                held = (one(),)
            case CellType():
                self.tables.append(_Variables(one, ("cell_contents",)))
                held = self.tables[-1].values()
            case type():
                held = () if is_class_of_library(one) else self._of_class(one)
            case _ if is_generator(one):
                self.generators.append(one)
            case Iterator():
                self.reaches_iterator |= type(one) not in _COPIED
            case _ if isinstance(one, nn.Module) or not is_class_of_library(type(one)):
                slots = _Variables(one, _slots(type(one)))
                self.tables += [vars(one), slots] if hasattr(one, "__dict__") else [slots]
                held = [*_attributes(one), *slots.values()]
        return held

    def _read_by(self, function: FunctionType) -> Iterator[Any]:
        """Yield what a function of the script reads beside its arguments."""
        file, inner = function.__code__.co_filename, unwrap(function)
        if is_own(file):
            return
        defaults, own = dict(enumerate(function.__defaults__ or ())), vars(function)
        self.tables += [defaults, own]
        yield from (*(function.__closure__ or ()), *defaults.values(), *own.values())
        yield from () if inner is function else (inner,)
        if not is_library(file):
            # Only names that it reads: compiled code puts its own there and takes them out again.
            code = function.__code__
            read = _Variables(function.__globals__, tuple(set(_names(code))), code)
            self.tables.append(read)
            yield from read.values()

    def _of_class(self, kind: type) -> Iterator[Any]:
        """Yield the attributes and methods of a class, and what it extends."""
        own = vars(kind).items()
        values = (k for k, v in own if not (k.startswith("__") or hasattr(v, "__get__")))
        self.tables.append(_Variables(kind, tuple(values)))
        yield from (getattr(v, "__func__", getattr(v, "fget", v)) for _, v in own)
        yield from kind.__bases__


class _Places(MutableMapping[str, Any]):
    """Single entries of many tables, as one."""

    def __init__(self, places: Iterable[tuple[MutableMapping[Any, Any], Any]]) -> None:
        self._places = {str(number): place for number, place in enumerate(places)}

    def __iter__(self) -> Iterator[str]:
        return (one for one, (table, name) in self._places.items() if name in table)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, one: str) -> Any:
        table, name = self._places[one]
        return table[name]

    def __setitem__(self, one: str, value: Any) -> None:
        table, name = self._places[one]
        table[name] = value

    def __delitem__(self, one: str) -> None:
        table, name = self._places[one]
        del table[name]


class _Variables(MutableMapping[str, Any]):
    """Some entries of a dict, or attributes of anything else, as a table. ``code``: what reads
    these variables of its file.
    """

    def __init__(self, holder: Any, names: tuple[str, ...], code: CodeType | None = None) -> None:
        self._names = names
        self._code = code
        if isinstance(holder, dict):
            self._get, self._set, self._drop = (
                holder.__getitem__,
                holder.__setitem__,
                holder.__delitem__,
            )
        else:
            self._get = partial(getattr, holder)
            self._set, self._drop = partial(setattr, holder), partial(delattr, holder)

    def writes(self, name: str) -> bool:
        """Return whether code may give a variable another value; attributes have it from anyone."""
        return self._code is None or name in _written(self._code)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._get(name)
        except (AttributeError, ValueError) as nothing:  # a cell that nothing was put into yet
            raise KeyError(name) from nothing

    def __setitem__(self, name: str, value: Any) -> None:
        self._set(name, value)

    def __delitem__(self, name: str) -> None:
        self._drop(name)


def _attributes(one: Any) -> list[Any]:
    own = vars(one) if hasattr(one, "__dict__") else {}
    return [v for k, v in own.items() if k not in _OF_MODULES] + [type(one)]


def _slots(kind: type) -> tuple[str, ...]:
    members = (vars(each).items() for each in kind.__mro__ if not is_class_of_library(each))
    return tuple(k for own in members for k, v in own if isinstance(v, MemberDescriptorType))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _written(code: CodeType) -> Iterator[str]:
    """Yield the variables of its file that code gives a value to."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _written(constant)
