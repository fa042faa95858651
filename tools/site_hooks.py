"""What MkDocs calls while it builds the site: adds the pages that are made from the code, fills
markers, links codes of findings, and marks pages that have no Chinese yet.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "tools", ROOT / "src"):
    sys.path.insert(0, str(folder))

import site_pages  # noqa: E402 - it lies in a folder that was just made known

UNTRANSLATED = '!!! note "本页尚无中文版，以下是英文原文。"\n\n'
CODES = {rule.code for rule in site_pages.CATALOGUE}
WHERE = re.compile(
    r"(?P<kept>^```.*?^```|`[^`\n]*`|\[[^\]]*\]\([^)]*\)|^#.*?$|^::: .*?$|https?://\S+)"
    r"|\b(?P<code>NS\d{3})\b",
    re.MULTILINE | re.DOTALL,
)
"""A code of a finding, outside of code blocks, links and headings."""

NOT_RUN = re.compile(r"^ *# Not run by the tests: .*\n", re.MULTILINE)
"""What a block says to the tests, and not to readers."""

_pages: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Make the generated pages once, and list the findings by their families."""
    if not _pages:
        _pages.update(site_pages.generated())
        findings = next(part["Findings"] for part in config.nav if "Findings" in part)
        unknown = [rule.code for rule in site_pages.CATALOGUE if rule.code[2] == "0"]
        findings += [f"findings/{code}.md" for code in unknown]
        for digit, name in site_pages.FAMILIES.items():
            codes = [rule.code for rule in site_pages.CATALOGUE if rule.code[2] == digit]
            findings.append({name: [f"findings/{code}.md" for code in codes]})
    return config


@event_priority(100)
def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages before the languages are told apart."""
    for path in _pages:
        files.append(File(path, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_nav(nav: Any, files: Any, **_: Any) -> Any:
    """Give the generated pages their text: the language plugin has made its files anew."""
    for file in files:
        if file.src_uri in _pages:
            file.content_string = _pages[file.src_uri]
    return nav


@event_priority(100)
def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the markers, link the codes, and mark what is not translated."""
    built, written = page.file.locale_alternate_of, page.file.locale
    for marker, text in site_pages.markers(built).items():
        markdown = markdown.replace(marker, text)
    if page.file.src_uri not in _pages:
        markdown = NOT_RUN.sub("", markdown)
    page.meta.update(site_pages.searched(page.file.norm_src_uri, built))
    here = posixpath.dirname(page.file.norm_src_uri)
    own = posixpath.basename(page.file.norm_src_uri).removesuffix(".md")

    def linked(found: re.Match[str]) -> str:
        code = found["code"]
        if code not in CODES or code == own:
            return found[0]
        return f"[{code}]({posixpath.relpath(f'findings/{code}.md', here or '.')})"

    markdown = WHERE.sub(linked, markdown)
    if built != written:
        heading, _, rest = markdown.partition("\n")
        markdown = f"{heading}\n\n{UNTRANSLATED}{rest}"
    return markdown
