"""Numbers that a running line computes of its variables: what a 0 of the program is spelled as."""

import pytest

from nanstop.tracing.source.line_numbers import zeros_handed_on, zeros_of_line

HEAD = """
import sys


class Config:
    none = None
    scale = 0.0
    kind = "low"

    def __init__(self):
        self.smoothing, self.tau, self.powers = 0.5, 0.0, {"low": 0, "high": 2}

    @property
    def costly(self):
        raise RuntimeError("nothing of the script's is called")


def run(self, x):
    count = 0
"""


def of_line(folder, text, place):
    """Return what the numbers of the line that asks are spelled as, and what they are made of."""
    path = folder / "a_script.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in text.splitlines()))
    known = {"found": zeros_of_line, "__name__": "a_script", "place": place}
    exec(compile(path.read_text(), str(path), "exec"), known)
    return [(one.text, one.value, one.of) for one in known["run"](known["Config"](), 3.0)]


ASKED = "found(sys._getframe(), place)"
DIVIDED = {
    "of an attribute": ("self.tau", (("self.tau", 0.0),)),
    "of a difference": ("1 - 2 * self.smoothing", (("self.smoothing", 0.5),)),
    "of a variable": ("count", (("count", 0.0),)),
    "of an entry": ("self.powers['low']", (("self.powers['low']", 0.0),)),
    "of an entry by name": (
        "self.powers[self.kind]",
        (("self.powers[self.kind]", 0.0),),
    ),
    "of a class": ("self.scale", (("self.scale", 0.0),)),
}


@pytest.mark.parametrize("named", DIVIDED)
def test_what_a_line_divides_by(tmp_path, named):
    divisor, of = DIVIDED[named]
    line = f"return {ASKED} or x / ({divisor})"
    assert of_line(tmp_path, line, "divisor") == [(divisor, 0.0, of)]


SAID_OF_NOTHING = {
    "not 0": "x / self.powers['high']",
    "a literal": "x / 0.0",
    "no divisor": "x * count",
    "a property": "x / self.costly",
    "a call": "x / float(count)",
    "no number": "x / self.none",
    "no variable": "x / nowhere",
    "an entry by another kind": "x / self.powers[self]",
    "an argument": "x.sum(count) / x",
}


@pytest.mark.parametrize("named", SAID_OF_NOTHING)
def test_what_is_no_number_that_a_line_divides_by(tmp_path, named):
    line = f"return {ASKED} if x else {SAID_OF_NOTHING[named]}"
    assert of_line(tmp_path, line, "divisor") == []


def test_a_factor_and_nothing_beside_it(tmp_path):
    line = f"return {ASKED} or (count + self.tau * x / 2, [x * self.powers['high']], x[count])"
    assert of_line(tmp_path, line, "factor") == [("self.tau", 0.0, (("self.tau", 0.0),))]


SEVERAL = """
try:
    held = []
    made = {{"a": x / self.powers["low"] if held else x,
             "b": (held.append({asked}) or x) / (
                  count)}}
except ZeroDivisionError:
    return held[0]
"""


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("keep = 1 - 2 * self.smoothing", "keep = 1 - 2 * self.smoothing"),
        ("keep = 1 - 2 * self.smoothing\nself.smoothing = 0.25", "keep"),
        ("keep = 1\nkeep = 1 - 2 * self.smoothing", "keep"),
    ],
)
def test_a_variable_is_spelled_as_it_was_given(tmp_path, given, spelled):
    line = f"{given}\nreturn {ASKED} or x / keep"
    ((text, value, _),) = of_line(tmp_path, line, "divisor")
    assert (text, value) == (spelled, 0.0)


def test_a_statement_of_several_lines(tmp_path):
    text = SEVERAL.format(asked=ASKED)
    assert of_line(tmp_path, text, "divisor") == [("count", 0.0, (("count", 0.0),))]


@pytest.mark.parametrize(("sign", "place"), [("/=", "divisor"), ("*=", "factor")])
def test_a_write_in_place(tmp_path, sign, place):
    text = f"holder = []\nx {sign} [holder.append({ASKED}), 1.0][1]\nreturn holder[0]"
    assert of_line(tmp_path, text, place) == []
    text = f"holder = []\nx {sign} holder.append({ASKED}) or 1.0 if x else count\nreturn holder[0]"
    assert of_line(tmp_path, text, place) == []


def test_the_body_of_a_loop_is_none_of_its_line(tmp_path):
    text = f"for each in {ASKED}, []:\n    return each\n    x / count"
    assert of_line(tmp_path, text, "divisor") == []


def test_what_is_added(tmp_path):
    line = f"return {ASKED} or (x + self.tau) * (x + 0.0)"
    assert of_line(tmp_path, line, "addend") == [("self.tau", 0.0, (("self.tau", 0.0),))]


HANDED = {
    "by name": ("divide(x, by=self.tau)", "self.tau"),
    "in its place": ("divide(x, 1 - 2 * self.smoothing)", "1 - 2 * self.smoothing"),
    "of a method by name": ("library.method(x, by=self.tau)", "self.tau"),
    "beside another 0": ("divide(x, by=self.tau, axis=count)", "self.tau"),
}
NOT_HANDED = {
    "another argument": "divide(x, axis=count)",
    "of a method in its place": "library.method(x, self.tau)",
    "a literal": "divide(x, 0.0)",
    "two calls": "[divide(x, self.tau), divide(x, count)]",
    "nothing": "divide(x)",
    "several at once": "divide(*[x, self.tau])",
}
LIBRARY = """
import sys


class Library:
    def method(self, x, by=0.0, axis=-1):
        return found(sys._getframe(1), [sys._getframe()], place) or [x / by]


def divide(x, by=0.0, axis=-1):
    return found(sys._getframe(1), [sys._getframe()], place) or [x / by]


library = Library()
"""


def handed_on(folder, call):
    known = {"found": zeros_handed_on, "place": "divisor", "__name__": "a_library"}
    for name, text in ("a_library", LIBRARY), ("a_script", f"{HEAD}    return {call}\n"):
        path = folder / f"{name}.py"
        path.write_text(text)
        exec(compile(text, str(path), "exec"), known)
    found = known["run"](known["Config"](), 3.0)
    return [one.text for one in found]


@pytest.mark.parametrize("named", HANDED)
def test_what_a_line_hands_to_a_function_that_divides_by_it(tmp_path, named):
    call, text = HANDED[named]
    assert handed_on(tmp_path, call) == [text]


@pytest.mark.parametrize("named", NOT_HANDED)
def test_what_is_not_known_to_be_handed_on(tmp_path, named):
    with pytest.raises(ZeroDivisionError):
        handed_on(tmp_path, NOT_HANDED[named])
