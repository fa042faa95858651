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


def test_a_file_that_is_not_there_writes_nothing_down(tmp_path):
    line = SourceLine(file=str(tmp_path / "gone.py"), line=1, function="f", text="x = math.inf")
    assert not writes_down(line, is_nan=False)
