"""Real processes under gloo that compute each layer together: they are observed, and unharmed."""

import pytest

from hosts.sharded.two_ranks import end, incidents, run
from versions import needs


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
        assert watched == plain
        assert told.count("nanstop: 2 processes train together: observed only") == 1
        assert "not watched any more" not in told
        rows, _ = incidents(tmp_path / fault)
        assert bool(rows) == (fault != "none")
        assert {(row["code"], row["action"]) for row in rows} <= {("NS000", "observe")}
        assert "help:" not in told  # nothing was tried
