"""A number that a line writes down is told from one that the line only brings in."""

import math

import numpy  # noqa: F401  (the text of a line is looked up by what is imported)
import pytest

from nanstop.records import SourceLine
from nanstop.tracing.source.written import writes_down

HEAD = """import math
import math as m
import numpy as np
from math import inf as ENDLESS, nan

def scores(values, least, inf):
    return (
        {}
    )
"""

WRITTEN = {
    "float('-inf')": math.inf,
    "[0.0 if v else -np.inf for v in values]": math.inf,
    "-1e999": math.inf,
    "values + ENDLESS": math.inf,
    "m.nan": math.nan,
    "nan": math.nan,
    "sorted(values, key=lambda v: v + float('NaN'))": math.nan,
}
BROUGHT_IN = {
    "values / 0.0": math.inf,
    "min(values, least)": math.nan,
    "inf": math.inf,
    "values.inf": math.inf,
    "np.where(values > 0, values, math.inf)": math.nan,
    "float('1.0') + float(least)": math.nan,
    "float('infinitely many')": math.inf,
    "'nan'": math.nan,
}


@pytest.mark.parametrize("text", [*WRITTEN, *BROUGHT_IN])
def test_lines(tmp_path, text):
    file = tmp_path / "script.py"
    file.write_text(HEAD.format(text))
    number = (WRITTEN | BROUGHT_IN)[text]
    line = SourceLine(file=str(file), line=8, function="scores", text=text)
    assert writes_down(line, is_nan=math.isnan(number)) is (text in WRITTEN)


@pytest.mark.parametrize(
    ("text", "is_beyond"),
    [
        ("torch.tensor(-1e9)", True),
        ("torch.tensor(torch.finfo(torch.float32).min)", True),
        ("torch.tensor(torch.finfo(values.dtype).min)", False),
        ("torch.tensor(-1e4)", False),
    ],
)
def test_a_number_beyond_its_format_is_an_infinity_in_it(tmp_path, text, is_beyond):
    file = tmp_path / "script.py"
    file.write_text(HEAD.format(text))
    line = SourceLine(file=str(file), line=8, function="scores", text=text)
    assert writes_down(line, is_nan=False, most=65504.0) is is_beyond
    assert not writes_down(line, is_nan=False)


def test_a_file_that_is_not_there_writes_nothing_down(tmp_path):
    line = SourceLine(file=str(tmp_path / "gone.py"), line=1, function="f", text="x = math.inf")
    assert not writes_down(line, is_nan=False)


def test_each_statement_of_a_line_is_asked(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("a = 1; b = a * float('inf'); c = 2\n")
    line = SourceLine(file=str(file), line=1, function="<module>", text="")
    assert writes_down(line, is_nan=False)
    assert not writes_down(line, is_nan=True)
