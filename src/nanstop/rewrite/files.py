"""Files of text as they are: in their own encoding, with their own line ends."""

from __future__ import annotations

import io
import tokenize
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
