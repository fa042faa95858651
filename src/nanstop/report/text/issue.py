"""An incident as Markdown for a public issue: without secrets, folders and texts.

What is left are modules, operations, shapes, ranges, versions and lines of code whose strings are
empty. Whoever posts it should read it all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nanstop.records import Environment, Report
from nanstop.report.text.about import about_machine, about_run
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.blocks.incident import incident_blocks
from nanstop.wording import printable

MOST_CHARS = 2000
"""Of one text: the end of a longer one is left out."""
SECRET, PATH, TEXT = "<secret>", "<path>", "<text>"

_SECRETS = re.compile(
    r"""
    (?P<before>\b(?:\w*[_-])?(?:key|token|secret|password|passwd|pwd|credential|authorization)s?
        ["'`]?\s*[=:]\s*["'`]?(?:bearer\s+)?)[^\s"'`,;)\]]+
    | (?P<scheme>\w+://)[^/\s@]+@
    | \bbearer\s+\S+
    | \b(?:hf|sk|pk|gh[opsu]|glpat|xox[abp]|wandb|rpa|nvapi)[_-](?=\w*\d)[\w-]{8,}
    | \b(?:AKIA|ASIA|AIza|github_pat_|eyJ)[\w.-]{8,}
    | \b(?=[\w+]*\d)(?=[\w+]*[A-Za-z])[A-Za-z0-9+]{32,}={0,2}
    | \b[\w.+-]+@[\w-]+\.[\w.-]+
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""What is called a secret, users of addresses, tokens by their beginnings, long random words, and
addresses of people.
"""
_ADDRESS = re.compile(r"\b(?:https?|file|s3|gs|hf)://[^\s`'\")\]]+")
_PUBLIC = re.compile(
    r"https://(?:[\w-]+\.)?(?:github\.com|pytorch\.org|arxiv\.org|huggingface\.co)/"
)
_INSTALLED = re.compile(r"[^\s'\"`(]*[/\\](?:site|dist)-packages[/\\]")
_FOLDERS = re.compile(
    r"""
    (?<![\w.)\]}>/\\:])
    (?:[A-Za-z]:[\\/] | ~[\\/] | \.{1,2}[\\/] | [\\/](?=[^\s/\\]))
    (?:[^'"`:;,()<>|\n]*[\\/])?
    (?P<file>[^\s'"`:;,()<>|]*)
    """,
    re.VERBOSE,
)
"""A path from its root; what stands between two paths goes with them, because folders may hold
spaces.
"""
_FILE = re.compile(r"[\w.-]+\.(?:py|pyx|cu|cpp|h|so|yaml|yml|json|toml)")
_STRING = re.compile(r"\"[^\"\n]*\"|(?<!\w)'[^'\n]*'")


def issue(report: Report) -> str:
    """Return an incident as Markdown: what happened and what was tried, on which versions.

    Messages of exceptions, environment variables and the names of scripts are left out.
    """
    blocks = incident_blocks(report)
    said = "\n".join(_line(block) for block in blocks)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", said)), default=0))
    versions = "\n".join(_versions(report.incident.environment, report))
    title = _flat(headline(report))
    return f"## {title}\n\n{fence}\n{said}\n{fence}\n\n### Environment\n\n{versions}\n"


def headline(report: Report) -> str:
    """Return what happened in one line."""
    first = incident_blocks(report)[0]
    return redacted(first.lead + "".join(first.cells))


def redacted(text: str) -> str:
    """Return a text without what looks like a secret, a folder, or a string of data."""
    public: list[str] = []

    def kept(found: re.Match[str]) -> str:
        if not _PUBLIC.match(found[0]) or "@" in found[0] or "?" in found[0]:
            return PATH
        public.append(found[0])
        return f"\0{len(public) - 1}\0"

    if len(text) > MOST_CHARS:
        text = f"{text[:MOST_CHARS]}..."
    text = text.replace("\0", "")
    text = _SECRETS.sub(_without_secret, _ADDRESS.sub(kept, text))
    text = _STRING.sub(TEXT, text)
    text = _FOLDERS.sub(_without_folder, _INSTALLED.sub("", text))
    return re.sub("\0(\\d+)\0", lambda found: public[int(found[1])], text)


def _without_secret(found: re.Match[str]) -> str:
    return f"{found['before'] or found['scheme'] or ''}{SECRET}"


def _without_folder(found: re.Match[str]) -> str:
    return f"{PATH}/{found['file']}" if _FILE.fullmatch(found["file"]) else PATH


def _line(block: Block) -> str:
    cells = (redacted(cell) for cell in block.cells)
    return printable(f"{block.lead}{block.gap.join(cells)}").rstrip()


def _flat(text: str) -> str:
    """Return a text as one line that Markdown and HTML leave alone."""
    plain = " ".join(printable(text).split())
    return re.sub(r"([\\`<>\[\]*_|@#])", r"\\\1", plain)


def _versions(env: Environment, report: Report) -> Iterator[str]:
    yield "| what | version |"
    yield "|---|---|"
    for name, value in (*about_machine(env), *about_run(report.incident.facts)):
        yield f"| {_flat(redacted(name))} | {_flat(redacted(value))} |"
