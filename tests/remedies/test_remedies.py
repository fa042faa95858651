"""How cures are said, and which of them change training."""

import subprocess
import sys

import pytest

from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.records.remedies import REMEDIES, describe, safety_of

NORM = "model.layers.2.post_feedforward_layernorm"
SAFE = {
    "island",
    "outer_autocast",
    "attention",
    "eager",
    "sdpa_kernel",
    "fp32_trainables",
    "fp32_logits",
    "fp32_optimizer_state",
    "stable_form",
    "memory_fill",
    "held_fill",
    "fp32_line",
}


def island(target, value="float32"):
    return Atom(remedy="island", target=target, value=value)


AUTOCAST = Atom(remedy="outer_autocast", value="float16")


@pytest.mark.parametrize(
    ("atoms", "said"),
    [
        ((), "change nothing"),
        ((island(NORM),), f"keep `{NORM}` in float32"),
        ((island(NORM, "float32->input"),), f"keep `{NORM}` in float32"),
        (
            (AUTOCAST, island("a"), island("b"), island("c")),
            "keep `a`, `b` and `c` in float32 under an outer float16 autocast",
        ),
        ((AUTOCAST,), "run the forward under an outer float16 autocast"),
        ((island(""),), "keep the whole model in float32"),
        (
            (Atom(remedy="clip", value="1.0"), island("a"), AUTOCAST),
            "keep `a` in float32 under an outer float16 autocast and clip the gradient norm at 1.0",
        ),
        (
            (Atom(remedy="drop_sample", target="0:3"), Atom(remedy="drop_sample", target="1:0")),
            "leave out sample 3 of micro-batch 0 and sample 0 of micro-batch 1",
        ),
        (
            [Atom(remedy="drop_sample", target=f"0:{row}") for row in (5, 0, 1, 2, 9, 8)],
            "leave out samples 0-2, 5 and 8-9 of micro-batch 0",
        ),
        ((Atom(remedy="drop_micro", target="2"),), "leave out micro-batch 2"),
        (
            (Atom(remedy="init_rows", target="lm_head.weight", value="mean"),),
            "re-initialise the untrained rows of `lm_head.weight` with the mean of the others",
        ),
        ((Atom(remedy="attention", value="sdpa"),), "compute attention with the `sdpa` kernel"),
    ],
)
def test_described(atoms, said):
    assert describe(atoms) == said


def test_every_cure_has_a_phrase():
    for name in REMEDIES:
        phrase = describe((Atom(remedy=name, target="0:1", value="v"),))
        assert phrase
        assert "{" not in phrase


def test_safety():
    assert {name for name in REMEDIES if safety_of((Atom(remedy=name),)) == "safe"} == SAFE
    assert safety_of((island("a"), Atom(remedy="bf16"))) == "changes_training"
    assert safety_of(()) == "safe"


def test_unknown_remedy():
    with pytest.raises(NanstopError, match="unknown remedy `prayer`"):
        safety_of((Atom(remedy="prayer"),))
    with pytest.raises(NanstopError, match="unknown remedy `prayer`"):
        describe((Atom(remedy="prayer"),))


def test_no_torch():
    code = (
        "import sys, nanstop.records.remedies, nanstop.prove.search; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
