"""The page of a finding, as it is printed."""

from __future__ import annotations

import sys

from nanstop.diagnose import pages
from nanstop.language.choice import language


def print_page(code: str, lang: str | None = None) -> None:
    """Print the page of a finding, or of NS001: drawn on a terminal, as Markdown elsewhere.
    ``lang`` None: in the language that is asked for.

    Errors: ``NanstopError`` NS001 for a code or a language that does not exist.
    """
    lang = lang or language()
    usage = code.upper() == "NS001"
    page = pages.usage_error(lang) if usage else pages.explain(code, lang=lang)
    if usage or not sys.stdout.isatty():
        sys.stdout.write(f"{page.rstrip()}\n")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(100, Console().width)).print(Markdown(page))
