"""Real processes under gloo that no wrapper joins: each leaves out by itself what would ruin its
weights, and is otherwise unharmed.
"""

import pytest

from hosts.sharded.two_ranks import end, incidents, run
from versions import needs

APART = "2 processes train together without acting as one: no cure is applied"


@pytest.fixture(scope="module", autouse=True)
def _parent_of_ranks():
    yield
    end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["layers", pytest.param("transformers", marks=needs("torch", "2.8", "weights in parts"))],
)
def test_tensor_parallelism(tmp_path, kind):
    for fault in ("none", "loss", "part"):
        _, plain, _ = run(tmp_path / f"{fault}-plain", "parallel", kind, fault, watched=False)
        codes, watched, told = run(tmp_path / fault, "parallel", kind, fault, seconds=120)
        assert codes == [0, 0], told
        if fault == "none":
            assert watched == plain
        assert "nan" not in watched[0]["losses"][4:] + watched[1]["losses"][4:]
        assert told.count(f"nanstop: {APART}") == 1
        assert "not watched any more" not in told
        rows, _ = incidents(tmp_path / fault)
        assert bool(rows) == (fault != "none")
        assert {(row["code"], row["action"]) for row in rows} <= {("NS000", "skip")}
        assert "help:" not in told  # nothing was tried


def test_gradients_that_the_script_averages(tmp_path):
    codes, plain, _ = run(tmp_path / "plain", "parallel", "whole", "none", watched=False)
    codes, watched, told = run(tmp_path / "none", "parallel", "whole", "none")
    assert (codes, watched) == ([0, 0], plain)
    assert incidents(tmp_path / "none")[0] == [], told
    codes, spoilt, told = run(tmp_path / "loss", "parallel", "whole", "loss")
    assert codes == [0, 0], told
    rows, _ = incidents(tmp_path / "loss")
    found = {(row["code"], row["rank"], row["step"], row["action"]) for row in rows}
    assert found == {("NS606", 0, 3, "skip"), ("NS204", 1, 3, "skip")}, told
    assert spoilt[0]["digest"] == spoilt[1]["digest"]
    assert spoilt[0]["losses"][:4] == plain[0]["losses"][:4]
    assert "nan" not in spoilt[1]["losses"][4:]
