"""Values that are missing, marked by NaN: the script leaves them out."""

import pytest

from loop_scripts import investigated, run_script, same
from nanstop.records import Report

LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 5))
optimizer = torch.optim.Adam(net.parameters(), 2e-3)
X, losses = torch.randn(60, 6), []
Y = X @ torch.randn(6, 5)
Y[torch.rand_like(Y) < 0.4] = float("nan")
W = torch.rand(60) + 0.5
for step in range(4):
    rows = torch.arange(12) + 12 * step
    x, y, w = X[rows], Y[rows], W[rows]
    known = ~y.isnan()
    p = net(x)
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach().clone() for p in net.parameters()]
"""
BY_LOADER = LOOP.replace(
    """for step in range(4):
    rows = torch.arange(12) + 12 * step
    x, y, w = X[rows], Y[rows], W[rows]
""",
    """from torch.utils.data import DataLoader, TensorDataset
for step, (x, y, w) in enumerate(DataLoader(TensorDataset(X, Y, W), batch_size=15)):
    if step == 0: y, known = y.nan_to_num(), None
""",
)
FILLED = "y.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)"


def report_of(path, loop, loss):
    _, news = investigated(path / "script.py", loop.format(loss=loss))
    return next(one for one in news if isinstance(one, Report))


@pytest.mark.parametrize("loop", [LOOP, BY_LOADER])
@pytest.mark.parametrize(
    ("loss", "code"),
    [
        ("loss = torch.where(known, (p - y).square(), 0.0).mean()", "NS304"),
        ("loss = ((p - y).square() * known).sum() / known.sum()", "NS204"),
    ],
)
def test_what_is_left_out_too_late_is_no_fault_of_the_data(tmp_path, loop, loss, code):
    report = report_of(tmp_path, loop, loss)
    assert report.diagnoses[0].code == code
    assert report.proof.verdict == "proven"
    (atom,) = report.proof.minimal
    line = loop.format(loss=loss).splitlines().index(f"    {loss}") + 1
    assert (atom.remedy, atom.target.rpartition(":")[2]) == ("finite_constant", str(line))


def test_what_is_typed_is_read_where_it_is_computed_with(tmp_path, capsys):
    from nanstop.rewrite.forms.form_code import codes_of

    loss = "loss = torch.where(~y.isnan(), (p - y).square(), 0.0).mean()"
    report = report_of(tmp_path, LOOP, loss)
    text = LOOP.format(loss=loss)
    (code, *_) = codes_of(report.proof, report.localization.first_bad, lambda _: text)
    assert loss.replace("- y)", f"- {FILLED})") in code.files[0].after


BY_FUNCTION = LOOP.replace(
    "for step in range(4):",
    """def masked(predicted, wanted, known):
    missed = (predicted - wanted).abs()
    return (missed * known).mean()

for step in range(4):""",
).replace(
    "known = ~y.isnan()",
    """y = torch.randn(12, 5)
    y[::3, 1] = float("inf")
    known = ~y.isinf()""",
)


def test_what_is_typed_is_read_by_the_name_that_the_line_has_for_it(tmp_path):
    from nanstop.rewrite.forms.form_code import codes_of

    loss = "loss = masked(p, y, known)"
    report = report_of(tmp_path, BY_FUNCTION, loss)
    text = BY_FUNCTION.format(loss=loss)
    (code, *_) = codes_of(report.proof, report.localization.first_bad, lambda _: text)
    assert f"(predicted - {FILLED.replace('y', 'wanted', 1)}).abs()" in code.files[0].after


@pytest.mark.parametrize(
    "loss",
    [
        "loss = (p - y).square().mean()",
        "loss = (p - y.clamp(min=3.0)).square().mean()",  # 0 and 1 come to the same there
        "loss = (p - y).square().nanmean()",
    ],
)
def test_what_is_not_left_out_is_the_datas(tmp_path, loss):
    report = report_of(tmp_path, LOOP, loss)
    assert report.diagnoses[0].code in ("NS501", "NS506")
    assert report.proof is None or report.proof.verdict != "proven"


NORMALISED = """
import torch
from torch import nn
from torch.nn.functional import layer_norm
torch.manual_seed(0)
frozen = nn.Linear(6, 16).requires_grad_(False)
net = nn.Sequential(nn.SiLU(), nn.Linear(16, 5))
optimizer = torch.optim.Adam(net.parameters(), 2e-3)
X, losses = torch.randn(60, 6), []
Y = X @ torch.randn(6, 5)
X[33, 2] = float("nan")
for step in range(4):
    x, y = X[12 * step:][:12], Y[12 * step:][:12]
    h = frozen(x)
    h = layer_norm(h, (16,))
    loss = (net(h) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_normalisation_makes_the_same_of_any_number_and_leaves_no_row_out(tmp_path):
    _, news = investigated(tmp_path / "script.py", NORMALISED)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code in ("NS501", "NS506")
    assert report.proof is None or report.proof.verdict != "proven"


def test_another_fault_beside_them_is_told_of_itself(tmp_path):
    loss = "loss = (p - y)[known].square().mean() + (p.mean(-1) * (w * (step != 2)).log()).mean()"
    report = report_of(tmp_path, LOOP, loss)
    assert report.diagnoses[0].code == "NS207"


@pytest.mark.parametrize(
    "loss",
    [
        "loss = (p - y)[known].square().mean()",
        "loss = torch.where(known, p - torch.where(known, y, 0.0), 0.0).square().mean()",
        "loss = ((p - y.nan_to_num()).square() * known).sum() / known.sum()",
        "y[~known] = 0.0; loss = ((p - y) * known).abs().mean()",
    ],
)
def test_what_is_left_out_in_time_is_left_alone(tmp_path, loss):
    source = LOOP.format(loss=loss)
    plain = run_script(tmp_path / "plain.py", source)
    watched, news = investigated(tmp_path / "watched.py", source)
    assert not [one for one in news if isinstance(one, Report)]
    assert watched["losses"] == plain["losses"]
    assert same(watched["PARAMETERS"], plain["PARAMETERS"])


NOISE = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(16, 64)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
X, Y, losses = torch.randn(256, 16), torch.randint(0, 64, (256, 1)), []
for step in range(2):
    u = torch.rand(256, 64)
    if BAD: u[255, 57] = float("nan")
    noise = -torch.log(-torch.log(u))
    p = torch.softmax((net(X) + noise) / 0.5, dim=-1)
    loss = -torch.log(p.gather(1, Y) + 1e-9).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach().clone() for p in net.parameters()]
"""


def test_a_number_that_is_computed_with_matters_however_little_it_does(tmp_path):
    _, news = investigated(tmp_path / "script.py", NOISE, BAD=True)
    report = next(one for one in news if isinstance(one, Report))
    assert report.diagnoses[0].code == "NS501"
    assert "finite_constant" not in str(report.proof.minimal)
