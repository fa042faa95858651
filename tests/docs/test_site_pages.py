"""Every code block of the site's own pages is run, in the order of its page and in one folder.

A block with a title is written to that file; ``sh`` is run by a shell; a ``text`` block behind it
is what the command writes, line by line, ``...`` standing for anything; python without a title is
run as on the pages of findings (``page_examples``). What is not run says why in its first line.
"""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from page_examples import NOT_RUN, run, same

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
PAGES = sorted(path for path in SITE.rglob("*.md") if not path.name.endswith(".zh.md"))
FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r'^ *--8<-- "([^"]+)"$', re.MULTILINE)
FAST = ("how-to/policy.md",)
"""Pages that take a few seconds."""
KINDS = {"python", "sh", "text"}


def name(page):
    return page.relative_to(SITE).as_posix()


def blocks(page):
    """The kind, the title and the text of each block."""
    return [
        (kind, title, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE))
        for indent, kind, title, text in FENCE.findall(page.read_text(encoding="utf-8"))
    ]


def in_shell(text, folder):
    """What the commands write."""
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    for tool, module in (("nanstop", " -m nanstop"), ("python", "")):
        path = tools / tool
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euc", text],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "NANSTOP_DIR": ".nanstop"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def included(text):
    return INCLUDED.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), text)


def to_run(page):
    return [block for block in blocks(page) if block[0] != "text" and not NOT_RUN.match(block[2])]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[] if name(page) in FAST else [pytest.mark.slow])
        for page in PAGES
        if to_run(page)
    ],
)
def test_the_blocks_of_a_page_do_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrote, compared = "", 0
    for kind, title, text in blocks(page):
        if NOT_RUN.match(text):
            wrote = ""
        elif title:
            (tmp_path / title).write_text(included(text), encoding="utf-8")
        elif kind == "sh":
            wrote = in_shell(text, tmp_path)
        elif kind == "python":
            compared += run(text)
        elif kind == "text" and wrote:
            lines = wrote.splitlines()
            missed = [
                said for said in text.splitlines() if not any(same(said, one) for one in lines)
            ]
            assert not missed, wrote
            compared += 1
    files = [title for _, title, _ in to_run(page) if title]
    assert compared or files, "nothing says what comes out"


def test_every_block_is_of_a_kind_that_is_run():
    for page in PAGES:
        for kind, title, text in blocks(page):
            assert kind in KINDS, name(page)
            assert text.startswith("# Not run") is bool(NOT_RUN.match(text)), name(page)
            if INCLUDED.search(text):
                assert title, name(page)
                assert (ROOT / INCLUDED.search(text)[1]).is_relative_to(ROOT / "examples")


def test_a_line_that_does_not_come_is_noticed():
    assert same("= replayed ... times", "  = replayed 3 times")
    assert not same("= replayed ... times", "  = replayed 3 times: bitwise identical")


@pytest.mark.parametrize("page", sorted(SITE.rglob("*.zh.md")), ids=name)
def test_a_chinese_page_has_the_blocks_and_the_links_of_the_english_one(page):
    english = page.with_name(page.name.replace(".zh.md", ".md"))
    assert blocks(page) == blocks(english)
    targets = re.compile(r"\]\(([^)]+)\)")
    both = [targets.findall(one.read_text(encoding="utf-8")) for one in (page, english)]
    assert sorted(both[0]) == sorted(both[1])
    markers = re.compile(r"<!-- .*? -->")
    assert markers.findall(page.read_text("utf-8")) == markers.findall(english.read_text("utf-8"))
