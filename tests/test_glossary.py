"""The glossary follows the code: what it names exists, and what the code is made of is in it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "nanstop"
ROW = re.compile(r"^\| (.+?) \| .+? \| (.+?) \|$", re.MULTILINE)
NOUNS = {
    *("host", "step", "micro-batch", "window", "view", "session", "sentinel", "gauge", "probe"),
    *(
        "headroom",
        "signal",
        "incident",
        "replay",
        "recorder",
        "localization",
        "evidence",
        "finding",
    ),
    *("diagnosis", "remedy", "atom", "cure", "trial", "reference", "proof", "decision", "action"),
    *("report", "supervisor", "crash report", "dry run", "job", "fork server", "guard", "plan"),
}
NOT_A_STAGE = {"cli", "demo"}


def rows():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = [row for row in ROW.findall(text) if row[0] != "word"]
    assert found
    return [(word, re.findall(r"`([\w.]+)`", where)) for word, where in found]


def exists(module):
    path = SRC.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_every_word_has_a_module_that_exists():
    assert [word for word, modules in rows() if not modules] == []
    assert [(word, m) for word, modules in rows() for m in modules if not exists(m)] == []


def test_every_word_stands_once():
    words = [word for row, _ in rows() for word in row.split(", ")]
    assert sorted(words) == sorted(set(words))


def test_the_nouns_of_the_code_are_explained():
    assert NOUNS - {word for row, _ in rows() for word in row.split(", ")} == set()


def test_every_stage_has_a_word():
    stages = {path.parent.name for path in SRC.glob("*/__init__.py")} - NOT_A_STAGE
    named = {module.partition(".")[0] for _, modules in rows() for module in modules}
    assert stages - named == set()
