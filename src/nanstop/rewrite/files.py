"""Files of text as they are, in their own encoding, with their own line ends; and what becomes of
them.
"""

from __future__ import annotations

import difflib
import io
import textwrap
import tokenize
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 4 * 2**20


def read(file: str) -> str | None:
    """Return the text of a file; None for one that is none, or longer than ``MAX_BYTES``."""
    try:
        path = Path(file)
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= MAX_BYTES else None
        return data.decode(encoding_of(data)) if data is not None else None
    except (OSError, SyntaxError, ValueError):
        return None


def is_of_project(file: str) -> bool:
    """Return whether a file lies below the working folder, and not in an environment there."""
    path, here = Path(file).resolve(), Path.cwd().resolve()
    if not path.is_relative_to(here):
        return False
    return not {"site-packages", "dist-packages"} & set(path.relative_to(here).parts)


def encoding_of(data: bytes) -> str:
    """Return the encoding that a file of Python declares, UTF-8 where it declares none.

    Errors: ``SyntaxError`` for one that does not exist.
    """
    return tokenize.detect_encoding(io.BytesIO(data).readline)[0]


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file with what it was and what it becomes."""

    file: str
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The change as a unified diff with the file's own name."""
        return unified(self, self.file)

    @property
    def shown(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Where its changes are, as lines of the old text counted from 1, each with its new
        lines.
        """
        old, new = self.before.splitlines(), self.after.splitlines()
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        return tuple(
            (start + 1, tuple(textwrap.dedent("\n".join(new[first:last])).splitlines()))
            for kind, start, _, first, last in matcher.get_opcodes()
            if kind != "equal"
        )


def unified(change: FileChange, name: str) -> str:
    """Return a change as a unified diff, as git writes it, under this name; one of a file outside
    of the project has its whole path.
    """
    old, new = (name, name) if Path(name).is_absolute() else (f"a/{name}", f"b/{name}")
    lines = difflib.unified_diff(
        io.StringIO(change.before, newline="\n").readlines(),
        io.StringIO(change.after, newline="\n").readlines(),
        old,
        new,
    )
    marked = (x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines)
    return "".join(marked)
