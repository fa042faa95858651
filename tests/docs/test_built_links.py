"""No link of the built site leads nowhere: files and places within pages, in both languages.

The site is that of ``make site``; ``NANSTOP_SITE`` names another folder.
"""

import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("NANSTOP_SITE", ROOT / "build" / "site")).resolve()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="no site here: make site"),
]


class Links(HTMLParser):
    """The addresses that a page leads to or loads, and its places."""

    def __init__(self, page):
        super().__init__()
        self.links, self.places = [], set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}
        name = {"a": "href", "link": "href", "img": "src", "script": "src"}.get(tag)
        if name is not None and given.get(name) and given.get("rel") != "canonical":
            self.links.append(given[name])


def test_no_link_is_dead():
    pages = {file: Links(file) for file in SITE.rglob("*.html")}
    dead, followed = [], 0
    for file, page in pages.items():
        for link in page.links:
            at = urlparse(link)
            if at.scheme:
                continue
            followed += 1
            path = unquote(at.path)
            base = SITE if path.startswith("/") else file.parent
            target = (base / path.lstrip("/")).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            place = unquote(at.fragment)
            if not target.exists() or (place and place not in pages[target].places):
                dead.append((str(file.relative_to(SITE)), link))
    assert followed > 10_000
    assert dead == []


def test_both_languages_have_every_page():
    def names(folder):
        found = {one.parent.relative_to(folder).as_posix() for one in folder.rglob("index.html")}
        return {one for one in found if not one.startswith("zh")}

    assert names(SITE / "zh") == names(SITE)
