"""A tensor made before the forward, into which a part of its result is written, is a part of the
step that is run again, and the script's own tensor is left as it is.
"""

import pytest
import torch

from e2e.scripts import HEAD
from loop_scripts import investigated, run_script
from nanstop.report.text.run_end import RunEnd

HEAD = HEAD.replace('BAD = "bad" in sys.argv\n', "")
LOOP = """
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
data, kept = torch.randn(8, 4), torch.zeros(8, 3)
losses, targets = [], []
for step in range(3):
    x = data * 1
    MAKE
    seen = torch.zeros(4)
    out = net(x)
    seen[step] = out.detach().mean()
    if not BAD:
        out = out + 1
    WRITE
    if not BAD:
        out = out - 2
    length = (out - y).square().sum(1)
    loss = torch.sqrt(length).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    targets.append(y.detach().clone())
PARAMETERS = list(net.parameters())
"""


@pytest.mark.parametrize(
    "make",
    [
        "y = torch.zeros(8, 3)",
        pytest.param("y = x.new_zeros(8, 3)", marks=pytest.mark.slow),
        "y = kept",
    ],
)
@pytest.mark.parametrize(
    "write",
    [
        "y[2] = out[2].detach()",
        pytest.param("y[x[:, 0] > 0] = out.detach()[x[:, 0] > 0]", marks=pytest.mark.slow),
        pytest.param("y.copy_(out.detach())", marks=pytest.mark.slow),
        pytest.param("part = y[2:4]; part.copy_(out[2:4].detach())", marks=pytest.mark.slow),
        "y = y.clone() if y is kept else y; y[2] = out[2]",
    ],
)
def test_a_target_that_the_step_fills(tmp_path, make, write):
    source = HEAD + LOOP.replace("MAKE", make).replace("WRITE", write)
    plain = run_script(tmp_path / "plain.py", source, BAD=False)
    healthy, news = investigated(tmp_path / "healthy.py", source, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)
    assert healthy["losses"] == plain["losses"]
    assert all(map(torch.equal, healthy["PARAMETERS"], plain["PARAMETERS"]))
    assert all(map(torch.equal, healthy["targets"], plain["targets"]))
    plain = run_script(tmp_path / "plain.py", source, BAD=True)
    bad, news = investigated(tmp_path / "bad.py", source, BAD=True)
    assert torch.equal(bad["targets"][0], plain["targets"][0])
    report = news[0]
    assert report.diagnoses[0].code == "NS304"
    assert report.incident.at.step == 0
    assert "torch.sqrt(length)" in report.localization.first_bad.source.text
    assert (report.replay.fidelity, report.replay.num_failed) == ("bitwise", report.replay.runs)
