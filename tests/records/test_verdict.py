"""What a proof says of the place of a failure."""

import pytest

from nanstop.records import Atom, OpEvent, Proof, SourceLine

LINE = SourceLine(file="train.py", line=7, function="loss_fn", text="y = z.pow(2).sum()")
EVENT = OpEvent(
    index=0,
    phase="forward",
    op="aten.pow.Tensor_Scalar",
    module="model.norm",
    source=LINE,
    inputs=(),
    outputs=(),
)
HERE = Atom(remedy="island", target="model.norm", value="float32")
TYPED = Atom(remedy="fp32_line", target="train.py:7", value="float32")
THERE = Atom(remedy="island", target="model.head", value="float32")
AROUND = Atom(remedy="outer_autocast", value="float16")


@pytest.mark.parametrize(
    ("atoms", "verdict", "expected"),
    [
        ((HERE,), "proven", True),
        ((TYPED,), "proven", True),
        ((HERE,), "plausible", False),
        ((THERE,), "proven", False),
        ((HERE, THERE), "proven", False),
        ((HERE, AROUND), "proven", False),
        ((Atom(remedy="bf16"),), "proven", False),
        ((), "proven", False),
    ],
)
def test_a_place_is_proven_by_a_cure_that_changes_nothing_else(atoms, verdict, expected):
    proof = Proof(incident="0000", verdict=verdict, minimal=atoms)
    assert proof.is_at(EVENT) is expected


def test_no_place_is_proven_where_none_is_known():
    proof = Proof(incident="0000", verdict="proven", minimal=(Atom(remedy="bf16"),))
    nowhere = OpEvent(
        index=0, phase="loss", op="aten.sum", module="", source=None, inputs=(), outputs=()
    )
    assert not proof.is_at(nowhere)
    assert not proof.is_at(None)
