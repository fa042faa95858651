"""Lines that gave a value to what a line works with: through loops, in scopes around a function,
and none where the source does not say.
"""

import linecache
import textwrap

import pytest
import torch

from nanstop.records import SourceLine
from nanstop.tracing.source.assignments import tree_of
from nanstop.tracing.source.bindings import (
    factors_given_at,
    handed_on_after,
    sliced_after,
    target_given_at,
    writing_lines,
)
from nanstop.tracing.source.holders import holder_of

SOURCE = textwrap.dedent("""
    def train(model, sums, rates):
        held = list(model.parameters())
        copies = [p.clone() for p in held]
        rate = 0.1
        scale = max(rate, 0.2)
        for copy, p in zip(copies, held):
            copy -= scale * p.grad  # zipped
        for n, p in enumerate(held):
            p.sub_(rates[n] * p.grad)  # numbered
        def update():
            for key, one in sums.items():
                one.mul_(0.9)  # of a function
        sums = {p: 0 for p in held}
        ids = encode("text")
        rows = ids[:5]  # sliced
        mask = ids if rate else None  # handed on
        unknown.add_(1)  # of nowhere


    def hook(grad):
        size = grad.norm()
        if size > 1:
            grad.mul_(1 / size)
        return grad
""")


@pytest.fixture
def at(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SOURCE)
    linecache.checkcache(str(file))

    def line(text):
        number = next(n for n, one in enumerate(SOURCE.splitlines(), 1) if text in one)
        return SourceLine(file=str(file), line=number, function="train", text=text)

    return line


def texts(lines):
    return [line.text.partition("  #")[0] for line in lines]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("# zipped", ["copies = [p.clone() for p in held]"]),
        ("# numbered", ["held = list(model.parameters())"]),
        ("# of a function", ["sums = {p: 0 for p in held}"]),
        ("# of nowhere", []),
    ],
)
def test_what_is_written_to_was_given_its_value_there(at, text, given):
    assert texts(target_given_at(at(text))) == given


def test_factors_are_numbers_and_no_elements(at):
    assert texts(factors_given_at(at("# zipped"))) == ["scale = max(rate, 0.2)"]


def test_slices_and_what_is_handed_on_come_after(at):
    assert texts(sliced_after(at("ids = encode"))) == ["rows = ids[:5]"]
    assert texts(handed_on_after(at("held = list"))) == ["copies = [p.clone() for p in held]"]
    assert sliced_after(at("rate = 0.1")) == ()


def test_a_file_that_is_gone_says_nothing(at):
    gone = SourceLine(file="/nowhere/script.py", line=3, function="f")
    assert target_given_at(gone) == factors_given_at(gone) == sliced_after(gone) == ()


def test_a_function_writes_where_it_does(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(SOURCE)
    names = {}
    exec(compile(SOURCE, str(file), "exec"), names)
    lines = SOURCE.splitlines()
    found = [lines[n - 1].strip() for n in writing_lines(names["hook"].__code__)]
    assert found == ["grad.mul_(1 / size)", "return grad"]


def test_a_source_file_is_parsed_once_and_anew_where_it_has_changed(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("a = 1\n")
    tree = tree_of(str(file))
    assert tree is not None
    assert tree_of(str(file)) is tree
    file.write_text("a = 1\nb = 22\n")
    linecache.checkcache(str(file))
    assert len(tree_of(str(file)).body) == 2


WRITES = """
    def train(rows):
        bank = rows.clone()
        plain = rows.clone()
        begun = rows.clone()
        begun[1] = 2.0
        for step in range(2):
            here = holder_of({})
            bank[0] = 1.0 / (step * 0.0 + 2.0)  # written
            begun[0] = 1.0
            plain = plain.clone()
        return here
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("bank", "bank[0] = 1.0 /"), ("plain", "plain = rows"), ("begun", "begun[1] = 2.0")],
)
def test_what_a_loop_writes_to_in_place_further_down_was_given_its_value_there(
    name, text, tmp_path
):
    file = tmp_path / "loop.py"
    file.write_text(textwrap.dedent(WRITES.format(name)))
    space = {"holder_of": holder_of}
    exec(compile(file.read_text(), str(file), "exec"), space)
    holder = space["train"](torch.zeros(3))
    assert (holder.name, holder.line.text.startswith(text)) == (name, True)


CALLS = """
    def forward(x, state):
        for t in range(2):
            here = holder_of(state) if t == 0 else here
            state = state + x
        return here

    def train(rows):
        state = rows.clone()
        return forward(rows, state)
"""


def test_an_argument_that_its_function_gives_other_values_was_given_by_the_caller(tmp_path):
    file = tmp_path / "recurrent.py"
    file.write_text(textwrap.dedent(CALLS))
    space = {"holder_of": holder_of}
    exec(compile(file.read_text(), str(file), "exec"), space)
    holder = space["train"](torch.zeros(3))
    assert (holder.name, holder.line.text) == ("state", "state = rows.clone()")
