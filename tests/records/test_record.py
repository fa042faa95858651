import dataclasses
import pickle

import pytest

from nanstop.records import StepId, Trial
from nanstop.records.record import record


@record
class Pair:
    left: int
    right: float = 0.0


def test_record_is_frozen_with_slots_and_keywords_only():
    pair = Pair(left=1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="left"):
        pair.left = 2
    with pytest.raises(TypeError, match="positional"):
        Pair(1)
    assert not hasattr(pair, "__dict__")
    assert Pair.__qualname__ == "Pair"
    assert [field.name for field in dataclasses.fields(Pair)] == ["left", "right"]


@pytest.mark.parametrize(
    "value", [StepId(run="r", step=1, micro=0, rank=0), Pair(left=1)], ids=repr
)
def test_record_survives_pickling(value):
    assert pickle.loads(pickle.dumps(value)) == value


def test_every_record_is_read_alike():
    for kind in (Trial, Pair):
        assert kind.__pydantic_config__ == {"ser_json_inf_nan": "strings", "extra": "forbid"}
