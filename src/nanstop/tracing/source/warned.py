"""Lines of the script at which NumPy has said so far that an operation has no finite value.

Data may be prepared long before a step reads it, by code that is not run again: what is known of
that is what Python notes of a warning, so that it is shown once. Asked of failures only.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nanstop.own_code import is_library
from nanstop.records import SourceLine
from nanstop.tracing.source.holders import script_frames

_MOST = 3
_SAID = re.compile(r"(invalid value|divide by zero|overflow) encountered in ")


def lines_without_value() -> tuple[SourceLine, ...]:
    """Return the lines, of each file in its order; () where they are too many to say anything."""
    found: dict[tuple[str, int], SourceLine] = {}
    for file, space in _spaces():
        noted = space.get("__warningregistry__")
        if type(noted) is not dict or not file or is_library(file):
            continue
        for line in sorted(line for key in list(noted) if (line := _line_of(key))):
            text = linecache.getline(file, line).strip()
            found[file, line] = SourceLine(file=file, line=line, function="", text=text)
    return tuple(found.values()) if len(found) <= _MOST else ()


def _spaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the variables of modules, and those of a script that is none, with their files."""
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", {})
        yield str(space.get("__file__", "")), space
    for frame, _ in script_frames():
        yield frame.f_code.co_filename, frame.f_globals


def _line_of(key: object) -> int:
    """Return the line of a warning that Python has noted, 0 where it is none of NumPy's."""
    if not isinstance(key, tuple) or len(key) != 3:
        return 0
    said, category, line = key
    is_said = isinstance(category, type) and issubclass(category, RuntimeWarning)
    return line if is_said and isinstance(line, int) and _SAID.match(str(said)) else 0
