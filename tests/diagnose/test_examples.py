"""Every example of every page is run, and what its comments say is compared with what comes out.

``page_examples`` has the convention.
"""

import re
import sys
import warnings

import pytest

from nanstop.diagnose import pages
from nanstop.diagnose.catalogue import CATALOGUE
from page_examples import BLOCK, NOT_RUN, run

SLOW = frozenset()
"""Pages whose examples take more than two seconds."""
WITHHELD = {"NS606": ["a race needs several processes"]}
"""Pages with blocks that are not run, and why."""

EXAMPLES = [
    (rule.code, block)
    for rule in CATALOGUE
    for block in BLOCK.findall(pages.page(rule).text)
    if not block.startswith("# Not run")
]


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path, monkeypatch):
    """An example begins with a fixed seed in an empty folder, and leaves no switch of torch or
    accelerate behind.
    """
    import torch

    monkeypatch.chdir(tmp_path)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield
    torch.use_deterministic_algorithms(deterministic)
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("code", "block"),
    [
        pytest.param(code, block, marks=[pytest.mark.slow] if code in SLOW else [], id=code)
        for code, block in EXAMPLES
    ],
)
def test_an_example_gives_what_it_says(code, block):
    assert run(block), "no comment says what comes out"


def test_what_is_not_run_says_why_and_is_little():
    found = {rule.code: NOT_RUN.findall(pages.page(rule).text) for rule in CATALOGUE}
    assert {code: reasons for code, reasons in found.items() if reasons} == WITHHELD
    blocks = {rule.code: BLOCK.findall(pages.page(rule).text) for rule in CATALOGUE}
    run_ones = [code for code, _ in EXAMPLES]
    for code, all_of_it in blocks.items():
        assert len(all_of_it) == run_ones.count(code) + len(WITHHELD.get(code, []))


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("1 + 1    # 3\n", "and it is '2'"),
        ("print(1)    # 2\n2    # 2\n", "and it is '1"),
        ("1 / 0    # ZeroDivisionError: division\n1\n", "division by zero"),
        ("len([])    # TypeError: no\n", "DID NOT RAISE"),
        ("[][0]    # KeyError: index out of range\n", "'IndexError' == 'KeyError'"),
    ],
)
def test_a_false_comment_is_noticed(block, fault):
    with pytest.raises(
        (AssertionError, ZeroDivisionError, pytest.fail.Exception), match=re.escape(fault)
    ):
        run(block)


def test_comments_that_are_right_are_counted():
    assert run("x = 1  # one\nx, x    # (1, ...)\n{}['a']    # KeyError: 'a'\n") == 2
