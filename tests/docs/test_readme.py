"""What README and the site's pages name exists: files behind links, commands and their options."""

import re
from pathlib import Path

import pytest
import typer.main

from nanstop import cli

ROOT = Path(__file__).parents[2]
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
SITE = sorted((ROOT / "docs" / "site").rglob("*.md"))
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r'(?:\]\(|src=")((?!https?:)[^)#"]+)')
COMMAND = re.compile(r"\bnanstop ([a-z-]+)((?: +[^`#\n]*)?)")


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_what_is_linked_exists(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_both_readmes_have_the_same_blocks():
    english, chinese = (BLOCK.findall(page.read_text(encoding="utf-8")) for page in READMES)
    assert english == chinese


@pytest.mark.parametrize("page", [*READMES, *SITE], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page):
    commands = typer.main.get_command(cli.app).commands
    text = page.read_text(encoding="utf-8")
    said = [*re.findall(r"`([^`\n]+)`", text), *BLOCK.findall(text)]
    for name, rest in (found for part in said for found in COMMAND.findall(part)):
        assert name in commands, name
        own = re.split(r" (?:\S+\.py|trl|accelerate|torchrun|llamafactory-cli|python)\b", rest)[0]
        known = {word for one in commands[name].params for word in (*one.opts, *one.secondary_opts)}
        for option in re.findall(r"(?<=\s)--[a-z-]+", own):
            assert option in known, f"nanstop {name} {option}"
