"""What an exponential or a logarithm is of, kept within bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from remedies.forms.test_log_space import under_form
from remedies.views import View

OF = {"exp": lambda x: x.exp(), "log": lambda x: torch.log(input=x)}
BETWEEN = {"atanh": lambda x: torch.atanh(x)}


@given(st.floats(-100.0, 200.0, width=32))
def test_an_exponential_is_what_it_was_up_to_its_bound(number):
    (value,), (slope,) = bounded("exp", [number])
    known = math.exp(min(number, 20.0))
    assert value.item() == pytest.approx(known, rel=1e-4)
    assert slope.item() == pytest.approx(known if number <= 20.0 else 0.0, rel=1e-4)


@given(st.floats(-1.0, 10.0, width=32))
def test_a_logarithm_is_what_it_was_from_its_bound_on(number):
    (value,), (slope,) = bounded("log", [number])
    bound = torch.tensor(1e-8).item()
    least = max(number, bound)
    assert value.item() == pytest.approx(math.log(least), rel=1e-4, abs=1e-6)
    assert slope.item() == pytest.approx(1 / least if number >= bound else 0.0, rel=1e-3)


def bounded(name, numbers):
    return under_form(OF[name], torch.tensor(numbers), value="bounded", remedy="form")


def test_bounds_are_within_the_format():
    x = torch.tensor([50.0, 0.0], dtype=torch.float16)
    for compute in OF.values():
        values, _ = under_form(compute, x, value="bounded", remedy="form")
        assert values.isfinite().all()


WHOLE = {
    "rsqrt": lambda n: n.rsqrt(),
    "divided": lambda n: 6 / n,
    "by_other": lambda n: torch.tensor(6.0) / n,
    "powered": lambda n: n.float() ** -0.5,
}


def test_of_whole_numbers_the_logarithm_is_that_of_1():
    atom = Atom(remedy="form", target=line_of("log"), value="bounded")
    with applied(View(torch.nn.Identity()), (atom,)):
        assert OF["log"](torch.tensor([0, 1, 3])).exp().tolist() == pytest.approx([1, 1, 3])


def test_what_else_a_line_computes_is_left_alone():
    small, none = torch.tensor([0.25, 0.5]), torch.tensor(0.0)

    def line(count):
        return small**2 / small / count

    number = line.__code__.co_firstlineno + 1
    atom = Atom(remedy="form", target=f"{__file__}:{number}", value="counted")
    with applied(View(torch.nn.Identity()), (atom,)):
        found = line(none)
    assert found.tolist() == small.tolist()


@pytest.mark.parametrize("name", WHOLE)
def test_a_count_of_0_is_1(name):
    counts = torch.tensor([0, 1, 3])
    for value, least in (("counted", 1), ("other_count", 2)):
        line = WHOLE[name].__code__.co_firstlineno
        atom = Atom(remedy="form", target=f"{__file__}:{line}", value=value)
        with applied(View(torch.nn.Identity()), (atom,)):
            found = WHOLE[name](counts)
        known = WHOLE[name](torch.tensor([least, 1, 3]))
        torch.testing.assert_close(found, known)


def test_another_bound_is_another_number_only_where_no_weight_has_a_part():
    def of(numbers, *, is_trained):
        atom = Atom(remedy="form", target=line_of("log"), value="other_bound")
        with applied(View(torch.nn.Identity()), (atom,)):
            return OF["log"](torch.tensor(numbers, requires_grad=is_trained)).item()

    usual = math.log(1e-8)
    assert of(0.0, is_trained=True) == pytest.approx(usual)
    assert of(0.0, is_trained=False) > usual + 1.0
    assert of(-1e-9, is_trained=True) == pytest.approx(usual)
    assert of(-2.0, is_trained=True) == pytest.approx(math.log(2.0))


@pytest.mark.parametrize(("number", "is_same"), [(0.5, True), (1.0000001, True), (1.7, False)])
def test_what_lies_far_beyond_a_pole_is_another_number_under_another_bound(number, is_same):
    def of(value):
        atom = Atom(remedy="form", target=line_of("atanh"), value=value)
        with applied(View(torch.nn.Identity()), (atom,)):
            return BETWEEN["atanh"](torch.tensor(number, requires_grad=True)).item()

    assert math.isfinite(of("other_bound"))
    assert (of("bounded") == of("other_bound")) == is_same


def line_of(name):
    return f"{__file__}:{(OF | BETWEEN)[name].__code__.co_firstlineno}"


def test_a_form_of_another_name_is_an_error():
    atom = Atom(remedy="form", target=line_of("exp"), value="bound")
    with pytest.raises(NanstopError), applied(View(torch.nn.Identity()), (atom,)):
        pass
