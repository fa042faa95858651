"""How pages are filled in: every text escaped, what does not print replaced."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanstop.wording import printable

if TYPE_CHECKING:
    from jinja2 import Template

FOLDER = Path(__file__).parent / "page"
MOST_CHARS = 2000
"""Of one text."""


@cache
def template(name: str, folder: Path = FOLDER) -> Template:
    """Return a template of a folder, which may use those of ours."""
    from jinja2 import Environment as Templates
    from jinja2 import FileSystemLoader, StrictUndefined

    templates = Templates(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"chart": trusted, "whole": _whole, "diff": _diff}
    templates.filters |= {"coded": _coded, "filled": _filled}
    return templates.get_template(name)


def trusted(markup: str) -> Any:
    """Return our own markup, which is not escaped: the style, the script, and charts, of which
    every text was escaped as they were written.
    """
    from markupsafe import Markup

    return Markup(markup)


def _printable(value: Any) -> Any:
    """Return a text without control characters and what turns the direction of writing; the end
    of a very long one is left out.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return printable(value if len(value) <= MOST_CHARS else f"{value[:MOST_CHARS]}...")


def _whole(text: str) -> Any:
    """Return a text that is to be copied: escaped, whatever its length."""
    from markupsafe import escape

    return escape(printable(text))


def _coded(text: str) -> Any:
    """Return prose with what is between backticks as code."""
    from markupsafe import Markup, escape

    parts = re.split(r"`([^`]+)`", _printable(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part)
        for at, part in enumerate(parts)
    )


def _filled(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the places of the columns in which any row says something."""
    return [at for at in range(max(map(len, rows), default=0)) if any(row[at] for row in rows)]


def _diff(text: str) -> Any:
    """Return a diff that is to be copied, its lines by what becomes of them."""
    from markupsafe import Markup

    lines = (
        Markup('<span class="{}">{}</span>').format(_LINES[line[0]], _whole(line))
        if line[:1] in _LINES
        else _whole(line)
        for line in text.splitlines(keepends=True)
    )
    return Markup("").join(lines)


_LINES = {"+": "added", "-": "removed", "@": "hunk"}


def policy_hash(text: str) -> str:
    """Return what a Content-Security-Policy calls a style or script of this very text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
