"""The tool that wraps docstrings and comments leaves code, and what fits, as it is."""

import ast
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDE = '''"""Short."""


def first(x):
    """Return x as it was given; what cannot be looked at, because it is too large for any memory, is None."""
    # A comment that is by far too wide for a line of this project, and says why the next line is as it is.
    return "a string that is by far too wide for a line of this project, and is none of this tool's business"


class Second:
    """Short.

    - an item of a list that goes on for much longer than any line may, so that it has to be wrapped somewhere
    ```python
    code = "that is wider than a line may be, but is an example, where every blank and every break counts"
    ```
    """

    field = 1
    """What the field holds."""
'''


def tool():
    path = ROOT / "tools" / "wrap_docstrings.py"
    spec = importlib.util.spec_from_file_location("wrap_docstrings", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_only_prose_is_wrapped():
    wrapped = tool().wrap(WIDE)
    wide = [line.strip()[:6] for line in wrapped.splitlines() if len(line) > 100]
    assert wide == ["return", "code ="]
    assert 'too large for any\n    memory, is None.\n    """' in wrapped
    assert "    - an item" in wrapped
    assert "\n      " in wrapped.partition("- an item")[2].partition("```")[0]
    assert [type(node) for node in ast.parse(wrapped).body] == [
        type(node) for node in ast.parse(WIDE).body
    ]


def test_what_is_wrapped_stays():
    once = tool().wrap(WIDE)
    assert tool().wrap(once) == once


def test_a_comment_parts_at_a_clause_without_its_sign():
    comment = "    # " + "a word " * 11 + "ends; what follows it is short.\n"
    first, second = tool().wrap("if 1:\n" + comment + "    pass\n").splitlines()[1:3]
    assert first.endswith("ends;")
    assert second == "    # what follows it is short."
