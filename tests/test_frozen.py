"""What ``frozen`` makes is what ``dataclasses`` would have made of the same class."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from nanstop.frozen import frozen


@frozen
class Span:
    """Positional, with a default, a factory and a look at what it was given."""

    first: int
    last: int = 9
    names: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self):
        if self.first > self.last:
            raise ValueError("first behind last")

    @property
    def length(self):
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Ordinary:
    first: int
    last: int = 9
    names: tuple[str, ...] = field(default_factory=tuple)


@frozen(kw_only=True)
class Named:
    """By name only."""

    value: object
    other: object = None


@frozen
class OwnText:
    """With methods of its own, which stay."""

    value: int

    def __repr__(self):
        return "own"

    def __eq__(self, other):
        return True

    __hash__ = None


CALLS = [((), {"first": 1}), ((1, 2), {}), ((1,), {"names": ("a",)}), ((1, 2, ("a",)), {})]
WRONG = [((), {}), ((1, 2, (), 4), {}), ((1,), {"first": 1}), ((1,), {"unknown": 1})]


@pytest.mark.parametrize(("args", "named"), CALLS)
def test_it_is_made_as_a_dataclass_is(args, named):
    one, other = Span(*args, **named), Ordinary(*args, **named)
    assert dataclasses.astuple(one) == dataclasses.astuple(other)
    assert repr(one) == repr(other).replace("Ordinary", "Span")
    assert hash(one) == hash(other)
    assert one == Span(*args, **named) != dataclasses.replace(one, last=99)
    assert one.length == other.last - other.first


@pytest.mark.parametrize(("args", "named"), WRONG)
def test_it_refuses_what_a_dataclass_refuses(args, named):
    for _ in range(2):  # before and after its own ``__init__`` is written
        with pytest.raises(TypeError) as ours:
            Span(*args, **named)
        with pytest.raises(TypeError) as theirs:
            Ordinary(*args, **named)
        assert str(ours.value) == str(theirs.value).replace("Ordinary", "Span")


def test_it_is_looked_at_after_it_was_made():
    with pytest.raises(ValueError, match="first behind last"):
        Span(10)


def test_it_is_frozen_and_has_slots():
    one = Span(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="first"):
        one.first = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="first"):
        del one.first
    with pytest.raises(dataclasses.FrozenInstanceError, match="new"):
        one.new = 2
    assert not hasattr(one, "__dict__")


def test_it_is_copied_and_pickled():
    one = Span(1, 2, ("a",))
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert other == one
        assert other is not one


def test_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        Named(1)
    assert Named(value=1) == Named(value=1) != Named(value=2)
    assert Named(value=float("nan")) != Named(value=float("nan"))
    assert Named(value=1) != Ordinary(1)


def test_its_own_methods_stay():
    assert repr(OwnText(1)) == "own"
    assert OwnText(1) == 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(OwnText(1))


def test_it_matches_by_place():
    match Span(1, 2):
        case Span(first, last):
            assert (first, last) == (1, 2)
        case _:
            pytest.fail("no match")


def test_it_goes_over_to_another_process_that_has_made_none(tmp_path):
    (tmp_path / "kept.py").write_text(
        "from nanstop.frozen import frozen\n@frozen\nclass Kept:\n    'One.'\n    value: int\n"
    )
    write = "import kept, pickle, sys; sys.stdout.buffer.write(pickle.dumps(kept.Kept(7)))"
    read = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).value)"
    run = {"cwd": tmp_path, "check": True, "capture_output": True}
    data = subprocess.run([sys.executable, "-c", write], **run).stdout
    assert subprocess.run([sys.executable, "-c", read], input=data, **run).stdout == b"7\n"
