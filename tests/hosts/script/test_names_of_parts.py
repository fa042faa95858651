"""What is named of a failure in a loop without a trainer: the part of the model as the model calls
it, and the entry of the batch as the script holds it.
"""

import nanstop
from loop_scripts import assert_left_alone, investigated
from nanstop.report.text.blocks.evidence import evidence

ZERO_WEIGHT = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = spectral_norm(nn.Linear(6, 8))
        last = nn.Linear(8, 1)
        if globals().get("BAD", True):
            nn.init.zeros_(last.weight)
        self.last = spectral_norm(last)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

torch.manual_seed(0)
model = Critic()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(3):
    loss = (1 - model(torch.randn(4, 6))).relu().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach() for p in model.parameters()]
"""
BOXES = """
import torch
from torch import nn

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes, self.score = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, images, targets):
        noised = torch.stack([torch.log(t["boxes"] / (1 - t["boxes"])) for t in targets])
        return self.score(torch.relu(self.boxes(noised) + images[:, None]))

torch.manual_seed(0)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(3):
    targets = [{"labels": torch.zeros(3), "boxes": torch.rand(3, 4)} for _ in range(4)]
    if globals().get("BAD", True) and step == 1:
        targets[2]["boxes"][1, 3] = 1.0
    loss = model(torch.randn(4, 6), targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = [p.detach() for p in model.parameters()]
"""


def _report(tmp_path, script):
    _, news = investigated(tmp_path / "script.py", script)
    return next(one for one in news if isinstance(one, nanstop.Report))


def _said(report):
    return " ".join(text for block in evidence(report.diagnoses[0], report) for text in block.cells)


def test_a_part_that_was_called_by_itself_has_its_name_in_the_model(tmp_path):
    report = _report(tmp_path, ZERO_WEIGHT)
    event = report.localization.first_bad
    assert event.module == "last.parametrizations.weight.0"
    assert event.inputs[0].name == "last.parametrizations.weight.original"
    assert_left_alone(tmp_path, ZERO_WEIGHT)


def test_no_sample_is_asked_for_where_weights_alone_are_read(tmp_path):
    said = _said(_report(tmp_path, ZERO_WEIGHT))
    assert "it reads weights alone: no sample has a part in it" in said
    assert "which sample" not in said
    assert "is 0 throughout" in said


def test_an_entry_of_a_list_of_dicts_has_its_place_and_its_key(tmp_path):
    report = _report(tmp_path, BOXES)
    assert "targets.2.boxes" in {fact.name for fact in report.incident.batch}
    assert report.localization.first_bad.inputs[0].name == "batch[targets.2.boxes]"
    said = _said(report)
    assert "weights alone" not in said
    assert "is 0 throughout" not in said
    assert "sample 2" in said
    assert_left_alone(tmp_path, BOXES)


LEVELS = BOXES.replace("torch.randn(4, 6)", "torch.randn(5, 6)").replace(
    "images[:, None]", "images[0]"
)


def test_a_list_with_another_number_of_dicts_is_not_of_the_samples(tmp_path):
    report = _report(tmp_path, LEVELS)
    assert report.localization.first_bad.inputs[0].name == "batch[targets.2.boxes]"
    assert report.localization.positions is None
