"""The pages of findings as parts of a page: what a code means is where the code is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.pages import page

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

FIX = {"en": "Fix", "zh": "如何修复"}
_HEADING = "h4"


@dataclass(frozen=True, slots=True)
class Explained:
    """``text``: the whole page. ``fix``: its section of what to do. Both are HTML of our own."""

    code: str
    title: str
    text: str
    fix: str


def explained(code: str, lang: str = "en") -> Explained | None:
    """Return the page of a finding; None for a code that this version does not have."""
    rule = next((rule for rule in CATALOGUE if rule.code == code), None)
    if rule is None:
        return None
    found = page(rule, lang)
    fix = found.text.partition(f"\n## {FIX[lang]}\n")[2].partition("\n## ")[0]
    return Explained(code, found.title, as_html(found.text), as_html(fix))


def as_html(text: str) -> str:
    """Return Markdown of our own as HTML: every text escaped, headings below those of the page,
    addresses as text, for a page leads nowhere.
    """
    parser = _parser()
    tokens = parser.parse(text.strip())
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = _HEADING
        token.children = list(_without_links(token.children or ())) or token.children
    return str(parser.renderer.render(tokens, parser.options, {}))


def _without_links(children: Any) -> Any:
    address = ""
    for child in children:
        if child.type == "link_open":
            address = str(child.attrGet("href"))
        elif child.type == "link_close":
            if address.startswith("https://"):
                yield _text(child, f" ({address})")
        else:
            yield child


def _text(like: Token, text: str) -> Token:
    made = like.copy()
    made.type, made.tag, made.nesting, made.content = "text", "", 0, text
    return made


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table")
