"""Numbers a little off 0 where a line has no value, there and wherever they are read next."""

import math

import pytest
import torch

from nanstop.records import Atom
from nanstop.records.line_forms import OFF_ZERO
from nanstop.remedies.apply import applied
from nanstop.remedies.forms.mode import zeros_moved, zeros_noted
from remedies.forms.test_log_space import under_form
from remedies.views import View

FORMS = {
    "sine": (lambda x: x.sin() / x, 1.0),
    "sine of a multiple": (lambda x: torch.sin(math.pi * x) / (math.pi * x), 1.0),
    "exponential": (lambda x: torch.expm1(x) / x, 1.0),
    "square": (lambda x: x.sin() ** 2 / x.square(), 1.0),
    "logarithm": (lambda x: x * x.log(), 0.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_line_comes_near_to_its_limit(name):
    compute, limit = FORMS[name]
    x = torch.tensor([0.0, 0.5])
    values, (slope,) = under_form(compute, x, value="off_zero", remedy="form")
    torch.testing.assert_close(values[0], torch.tensor(limit), rtol=0.0, atol=2e-5)
    torch.testing.assert_close(values[1], compute(x)[1])
    assert slope.isfinite().all()


def width(s, y):
    z = y / s
    return s * z.tanh() + s * z


def test_lines_behind_it_read_the_same_number():
    target = f"{__file__}:{width.__code__.co_firstlineno + 1}"
    atom = Atom(remedy="form", target=target, value="off_zero")
    with applied(View(torch.nn.Identity()), (atom,)):
        found = width(torch.tensor([0.0, 2.0]), torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([3.0, 2 * math.tanh(0.5) + 1.0]))


def through_a_view(s, y):
    root = s.square()
    below = root.sqrt().unsqueeze(-1)
    return (root * (y / below)).sum()


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_is_0_is_found_where_it_begins(is_trained):
    target = f"{__file__}:{through_a_view.__code__.co_firstlineno + 3}"
    guard = Atom(remedy="form", target=target, value="guarded")
    s = torch.tensor([0.0, 2.0], requires_grad=is_trained)
    y = torch.ones(2, 2)
    with zeros_noted((guard,)) as noted:
        through_a_view(s, y)
    (zeros,) = noted.values()
    assert zeros.of_data is not is_trained
    with zeros_moved(noted, 1e-3):
        near = through_a_view(s, y)
    moved = torch.tensor([1e-3, 2.0]).double()
    torch.testing.assert_close(near, through_a_view(moved, y.double()), rtol=1e-5, atol=0.0)


def of_rows(table, rows):
    ratio = table[rows]
    return ratio.clamp(max=5.0) / ratio


def test_rows_are_no_number_that_is_0():
    target = f"{__file__}:{of_rows.__code__.co_firstlineno + 2}"
    guard = Atom(remedy="form", target=target, value="guarded")
    table, rows = torch.tensor([2.0, 8.0, 0.0]), torch.tensor([2, 1])
    with zeros_noted((guard,)) as noted:
        of_rows(table, rows)
    with zeros_moved(noted, 1e-3):
        near = of_rows(table, rows)
    torch.testing.assert_close(near, torch.tensor([1.0, 0.625]).double())


def in_place(s, y):
    z = y / s
    s.mul_(2.0)
    s += 1.0
    s[1] = 5.0
    return z + s


def test_what_is_written_to_is_the_tensor_itself():
    target = f"{__file__}:{in_place.__code__.co_firstlineno + 1}"
    atom = Atom(remedy="form", target=target, value="off_zero")
    s = torch.zeros(2)
    with applied(View(torch.nn.Identity()), (atom,)):
        in_place(s, torch.ones(2))
    assert torch.equal(s, torch.tensor([1.0, 5.0]))


def test_nothing_is_kept_of_tensors_that_are_gone():
    target = f"{__file__}:{width.__code__.co_firstlineno + 1}"
    atom = Atom(remedy="form", target=target, value=next(iter(OFF_ZERO)))
    with applied(View(torch.nn.Identity()), (atom,)):
        s = torch.zeros(2)
        width(s, torch.ones(2))
        assert (s + 1.0 == 1.0 + 1e-6).all()
        del s
        assert (torch.zeros(2) + 1.0 == 1.0).all()
