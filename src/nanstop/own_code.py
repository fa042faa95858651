"""Whose code a file holds: nanstop's own, a library's, or that of whoever trains.

Files are compared with the places of the modules as they were imported, never with names in paths:
a user's folder may be called as a library is, and a library that is being worked on lies anywhere.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

_NANSTOP = __name__.partition(".")[0]
_AS_A_USER = ("nanstop.demo", "nanstop.faults")
"""Parts of nanstop that do what a script does: their lines are worth showing."""
_WRAPPERS = ("torch", "bitsandbytes", "accelerate", "deepspeed", "transformers.utils")
"""Packages whose frames stand around the line that a user would want to see."""
_LIBRARIES = ("torch", "bitsandbytes", "accelerate", "transformers", "trl", "peft", "datasets")
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")


@lru_cache(maxsize=4096)
def is_own(file: str) -> bool:
    """Return whether a file is nanstop's, other than those parts of it that do what a script
    does.
    """
    return _lies(file, _own_places(_NANSTOP)) and not any(
        _lies(file, _own_places(name)) for name in _AS_A_USER
    )


@lru_cache(maxsize=4096)
def is_wrapper(file: str) -> bool:
    """Return whether the lines of a file stand around the one that a user would want to see."""
    return is_own(file) or _is_installed(file, _WRAPPERS)


@lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a file is nanstop's own, Python's, that of a library of training, or lies
    where packages do.
    """
    if file.startswith("<frozen"):
        return True
    return is_own(file) or _lies(file, _installed_folders()) or _is_installed(file, _LIBRARIES)


def is_of_library(function: Any) -> bool:
    """Return whether a function is nanstop's, Python's or a library's, and no script's own."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return is_library(code.co_filename) or lies_in(code.co_filename, _NANSTOP)


def is_class_of_library(kind: type) -> bool:
    """Return whether a class is of no script: nanstop's, Python's or a library's."""
    if kind.__module__ == "__main__":
        return False
    file = _file_of(kind)
    return file is None or is_library(file)


def is_class_of(kind: type, *modules: str) -> bool:
    """Return whether a class is of one of these modules, or of their packages, as installed."""
    file = _file_of(kind)
    return file is not None and _is_installed(file, modules)


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


@lru_cache(maxsize=4096)
def lies_in(file: str, *modules: str) -> bool:
    """Return whether a file is that of one of these modules or lies in its package.

    Of modules that are not imported no code can be running: none of theirs is recognised.
    """
    return any(_lies(file, _all_forms(_places(name))) for name in modules)


@lru_cache(maxsize=4096)
def is_torchs(file: str) -> bool:
    """Return whether a file is torch's, or nanstop's, which stands in for it."""
    return is_own(file) or lies_in(file, "torch")


def _is_installed(file: str, packages: Iterable[str]) -> bool:
    return any(_lies(file, _installed(name, _places(name))) for name in packages)


def _lies(file: str, places: Iterable[str]) -> bool:
    if file.startswith("<"):  # no file at all
        return False
    forms = _forms(file)
    return any(
        form == place or form.startswith(place + os.sep) for place in places for form in forms
    )


@lru_cache(maxsize=4096)
def _forms(path: str) -> tuple[str, ...]:
    """Return a path as it is given and as it is without links:
    either may be what a module was imported by.
    """
    return tuple({os.path.normcase(path), os.path.normcase(os.path.realpath(path))})


@cache
def _own_places(name: str) -> tuple[str, ...]:
    """Return where a part of nanstop lies, imported or not:
    its files may also be run as scripts.
    """
    spec = find_spec(name)
    return _all_forms(() if spec is None else spec.submodule_search_locations or (spec.origin,))


def _places(name: str) -> tuple[str, ...]:
    module = sys.modules.get(name)
    found = getattr(module, "__path__", None) or (getattr(module, "__file__", None),)
    return tuple(filter(None, found))


@cache
def _installed(name: str, places: tuple[str, ...]) -> tuple[str, ...]:
    """Return those places of a module that its distribution has put there:
    any folder may bear the name.
    """
    package = name.partition(".")[0]
    if not places or package in ("torch", _NANSTOP):  # no other one can be imported here
        return _all_forms(places)
    homes = _all_forms(_homes(package))
    return tuple(place for place in _all_forms(places) if _lies(place, homes))


def _homes(package: str) -> Iterator[str]:
    """Yield the folder in which a package was installed, and that in which it is worked on if it
    is editable.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return
    yield str(distribution.locate_file(""))
    origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
    if origin.startswith("file:"):
        from urllib.request import url2pathname

        yield url2pathname(urlsplit(origin).path)


@cache
def _installed_folders() -> tuple[str, ...]:
    """Return where Python and packages are installed, but not a folder that the script itself
    lies in.
    """
    found = {sysconfig.get_path(name) for name in _PATHS} | set(site.getsitepackages())
    found |= {site.getusersitepackages(), *_homes("torch")}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    beside = _forms(str(Path(script).absolute().parent)) if script else ()
    return tuple(place for place in _all_forms(found) if place not in beside)


def _all_forms(paths: Iterable[str | None]) -> tuple[str, ...]:
    ends = (form.rstrip(os.sep) for path in paths if path for form in _forms(path))
    return tuple(dict.fromkeys(ends))


def without_own(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of nanstop."""
    kept = []
    while traceback is not None:
        if not is_own(traceback.tb_frame.f_code.co_filename):
            kept.append(traceback)
        traceback = traceback.tb_next
    for each, following in zip(kept, [*kept[1:], None], strict=False):
        each.tb_next = following
    return kept[0] if kept else None
