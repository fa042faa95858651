"""Plain loops that fail by their masks, their clipping, their learning rate or their data, under
a watch.
"""

import contextlib
import math
import warnings

import pytest
import torch
from torch import nn

import nanstop
from loop_scripts import investigated
from nanstop.records import Atom, Report


def watched(folder, model, optimizer, steps, clip=None):
    """Train on (loss_fn, batch) pairs, each a step;
    ``clip(parameters)`` is the loop's own. Return the diagnoses.
    """
    watch = nanstop.watch(model, optimizer, policy="skip", out=folder)
    with contextlib.suppress(nanstop.NanstopError), watch:  # it stops after three failures in a row
        for loss_fn, batch in steps:
            watch.step(loss_fn, batch)
            if clip is not None:
                clip(list(model.parameters()))
            watch.update(clip=None)
    return [[(d.code, d.confidence) for d in report.diagnoses] for report in watch.incidents]


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.near(x).square().mean() + self.far(x).square().sum(-1).sqrt().mean()


def by_total_norm(parameters):
    norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters))
    for parameter in parameters:
        parameter.grad.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))


@pytest.mark.parametrize(
    "clip", [by_total_norm, lambda ps: nn.utils.clip_grad_norm_(ps, 1.0)], ids=["own", "torch"]
)
def test_clipping_of_the_loops_own_is_said_beside_the_cause(tmp_path, clip):
    torch.manual_seed(0)
    model = TwoHeads()
    bad = torch.randn(4, 8)
    bad[1] = 0.0
    batches = (torch.randn(4, 8), bad, torch.randn(4, 8))
    steps = [(lambda batch: model(batch["x"]), {"x": x}) for x in batches]
    (found,) = watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-3), steps, clip)
    assert found[0] == ("NS304", "certain")
    assert "NS305" in {code for code, _ in found}


def run_away(tmp_path, lr, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(dtype)

    def loss_fn(batch):
        return (model(batch["x"]) - batch["x"].sum(-1, keepdim=True)).square().mean()

    steps = [(loss_fn, {"x": torch.randn(8, 16, dtype=dtype)}) for _ in range(12)]
    return watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=lr), steps)


def test_a_warning_of_the_failing_step_is_shown_once(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def loss_fn(batch):
        if len(batch["x"]) < 2:
            warnings.warn("a lonely sample", UserWarning, stacklevel=1)
        centred = model(batch["x"]) - batch["x"].mean()
        return centred.square().sum() / (len(batch["x"]) - 1)

    steps = [(loss_fn, {"x": torch.randn(rows, 4)}) for rows in (4, 1, 4)]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        (found,) = watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-3), steps)
    assert found
    assert [str(warning.message) for warning in shown] == ["a lonely sample"]


@pytest.mark.parametrize("lr", [0.6, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_learning_rate_that_runs_away(tmp_path, lr, dtype):
    assert run_away(tmp_path, lr, dtype)[0][0] == ("NS404", "certain")


@pytest.mark.parametrize(("lr", "spike", "code"), [(30.0, 1.0, "NS404"), (1e-3, 1e4, "NS207")])
def test_one_update_that_ruins_the_weights_is_told_from_data_that_does_not_fit(
    tmp_path, lr, spike, code
):
    """How far SGD moves a weight follows from no setting: it is measured once a step has failed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def loss_fn(batch):
        sizes = torch.exp(model(batch["x"]) * batch["scale"])
        return (sizes - batch["y"]).square().mean()

    steps = [
        (loss_fn, {"x": torch.randn(16, 8), "y": torch.rand(16, 4) * 20, "scale": torch.ones(1)})
        for _ in range(4)
    ]
    steps[2][1]["scale"][0] = spike
    found = watched(tmp_path, model, optimizer, steps)
    assert found[0][0][0] == code


PAST_ITS_SCALER = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for _ in range(4):
    sizes = torch.exp(model(torch.randn(16, 8)))
    loss = (sizes - torch.rand(16, 4) * 20).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    optimizer.step()
"""


def test_weights_that_one_update_past_its_scaler_ruins_are_not_told_of_the_rate(tmp_path):
    _, news = investigated(tmp_path / "script.py", PAST_ITS_SCALER, on_failure="skip")
    report = next(one for one in news if isinstance(one, Report))
    found, *others = report.diagnoses
    assert (found.code, found.confidence) == ("NS112", "certain")
    assert all(one.code != "NS404" for one in others)
    assert "gradients 4096 times too large" in found.cause
    assert report.proof.minimal == (Atom(remedy="unscale", value="4096"),)
    assert report.proof.verdict == "proven"


def test_a_schedule_that_divides_by_zero_is_named_where_it_broke_the_weights(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n < 3 else math.nan)
    watch = nanstop.watch(model, optimizer, policy="observe", out=tmp_path)
    with watch:
        for _ in range(5):
            watch.step(lambda batch: model(batch["x"]).square().mean(), {"x": torch.randn(4, 8)})
            watch.update(clip=None)
            schedule.step()
    found = watch.incidents[0]
    assert (found.incident.at.step, found.diagnoses[0].code) == (3, "NS402")
    assert "learning rate is nan" in found.diagnoses[0].cause


def test_a_learning_rate_that_learns_is_left_in_peace(tmp_path):
    assert run_away(tmp_path, 0.01) == []


@pytest.mark.parametrize(
    ("height", "first"), [(3e5, ("NS201", "possible")), (3e20, ("NS504", "likely"))]
)
def test_a_lone_spike_is_no_divergence(tmp_path, height, first):
    """Of two failures that come out of the blue one is a sample's, the other a constant of the
    loss.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 1)

    def loss_fn(batch):
        largest = batch["x"].abs().amax()
        beyond = 1e38 if 1e5 < largest < 1e6 else 1.0  # float32 ends at 3.4e38
        return model(batch["x"]).mul(beyond).square().mean()

    batches = [torch.randn(6, 8) for _ in range(6)]
    rows = slice(2, 3) if first[0] == "NS504" else slice(None)
    batches[4][rows] *= height
    steps = [(loss_fn, {"x": x}) for x in batches]
    (found,) = watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-3), steps)
    assert found[0] == first
    assert "NS404" not in {code for code, _ in found}


@pytest.mark.parametrize(
    ("lowest", "shift", "code"),
    [(math.nan, 40.0, "NS203"), (-math.inf, 40.0, "NS202"), (math.nan, 0.0, None)],
    ids=["lowest number", "infinity", "scores near zero"],
)
def test_a_masked_row_under_negative_scores(tmp_path, lowest, shift, code):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).half()
    lowest = torch.finfo(torch.float16).min if math.isnan(lowest) else lowest
    mask = torch.zeros(6, 6, dtype=torch.float16).masked_fill(torch.ones(6, 6).triu(1) > 0, lowest)
    mask[2] = lowest

    def loss_fn(batch):
        scores = model(batch["x"]) @ batch["x"].transpose(1, 2) - shift
        return (torch.softmax((scores + mask).float(), -1) @ batch["x"].float()).square().mean()

    steps = [(loss_fn, {"x": torch.randn(3, 6, 8).half()})]
    found = watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-4), steps)
    assert [codes[0][0] for codes in found] == ([code] if code else [])
