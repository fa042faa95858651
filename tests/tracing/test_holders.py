"""Which line of a script gave a variable its value."""

import pytest

from nanstop.tracing.source.holders import holder_of


def line_of(folder, text):
    """Return the text of the line that ``rows[0]["x"]`` of a script is said to come of."""
    path = folder / "a_script.py"
    path.write_text("import torch\n" + text)
    known = {"holder_of": holder_of, "__name__": "a_script"}
    exec(compile(path.read_text(), str(path), "exec"), known)
    told = known["told"]
    return told.name, told.line.text if told.line is not None else None


def test_the_last_line_before_the_one_that_runs(tmp_path):
    text = """
rows = [{"x": torch.ones(2)}]
if len(rows) == 1:
    rows = [{"x": torch.zeros(2)}]
told = holder_of(rows[0]["x"])
rows = []
"""
    assert line_of(tmp_path, text) == ("rows[0]['x']", 'rows = [{"x": torch.zeros(2)}]')


def test_a_write_to_an_element_of_an_element(tmp_path):
    text = """
rows = [{"x": torch.ones(2)}]
rows[0]["x"][1] = float("nan")
told = told if "told" in globals() else holder_of(rows[0]["x"])
"""
    assert line_of(tmp_path, text) == ("rows[0]['x']", 'rows[0]["x"][1] = float("nan")')


@pytest.mark.parametrize(
    "write",
    [
        'rows[0]["x"].view(-1)[1] = float("nan")',
        'rows[0]["x"].data[0] = float("nan")',
        'rows[0]["x"].numpy()[0] = float("nan")',
        'rows[0]["x"].view(2, 1).T.fill_(float("nan"))',
    ],
)
def test_a_write_through_a_view(tmp_path, write):
    text = f"""
rows = [{{"x": torch.ones(2)}}]
{write}
told = told if "told" in globals() else holder_of(rows[0]["x"])
"""
    assert line_of(tmp_path, text) == ("rows[0]['x']", write)


def test_an_attribute_of_such_a_name(tmp_path):
    text = """
class Set:
    def __init__(self):
        self.data = [torch.ones(2)]
    def ask(self):
        return holder_of(self.data[0])
told = Set().ask()
"""
    assert line_of(tmp_path, text) == ("self.data[0]", "self.data = [torch.ones(2)]")


ARMS = """
which = {which!r}
if which == "a":
    rows = [{{"x": torch.ones(2)}}]
    {inside}
elif which == "b":
    rows = [{{"x": torch.zeros(2)}}]
else:
    rows = [{{"x": torch.full((2,), 2.0)}}]
told = told if "told" in globals() else holder_of(rows[0]["x"])
"""


def test_arms_of_which_one_has_run(tmp_path):
    for which in "abc":
        text = ARMS.format(which=which, inside="pass")
        assert line_of(tmp_path, text) == ("rows[0]['x']", None)


def test_the_arm_that_runs(tmp_path):
    text = ARMS.format(which="a", inside='told = holder_of(rows[0]["x"])')
    assert line_of(tmp_path, text) == ("rows[0]['x']", 'rows = [{"x": torch.ones(2)}]')


CLASSES = """
class Other:
    def __init__(self):
        self.x = torch.ones(3)


class Data:
    def __init__(self, shrinks):
        self.x = torch.ones(2)
        self.x[1] = 2.0
        self.x = self.x / 0.0
        {more}


class Another:
    def __init__(self):
        self.x = torch.ones(4)


data = Data(False)
told = holder_of(data.x)
"""


def test_the_last_line_of_a_constructor_that_gives_an_attribute_its_value(tmp_path):
    text = CLASSES.format(more="self.y = 1")
    assert line_of(tmp_path, text) == ("data.x", "self.x = self.x / 0.0")


def test_a_constructor_of_which_a_part_has_run_perhaps(tmp_path):
    text = CLASSES.format(more="if shrinks: self.x = self.x[:1]")
    assert line_of(tmp_path, text) == ("data.x", None)


OF_A_LIBRARY = """
from argparse import Namespace


class Own(Namespace):
    x = torch.zeros(1)

    def follow(self):
        self.x = self.x + 1.0
        {more}


own = Own()
own.follow()
told = holder_of(own.x)
"""


def test_the_method_that_gives_an_attribute_its_value_where_a_library_constructs(tmp_path):
    text = OF_A_LIBRARY.format(more="pass")
    assert line_of(tmp_path, text) == ("own.x", "self.x = self.x + 1.0")


def test_two_lines_that_may_have_given_it(tmp_path):
    text = OF_A_LIBRARY.format(more="if self.x > 9: self.x = None")
    assert line_of(tmp_path, text) == ("own.x", None)
