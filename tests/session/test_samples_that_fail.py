"""Which samples a failure is of, where its first bad operation is bad in others as well."""

from loop_scripts import investigated
from nanstop.store.incidents import load_report

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 3)

    def forward(self, ids, mask):
        h = self.table(ids)
        bias = (1 - mask.half()) * -1e9
        scores = (h @ h.transpose(1, 2)).half() + bias[:, None]
        weighed = scores.softmax(-1).float() @ h
        return self.head(weighed.mean(1)) BESIDE


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
lengths = torch.tensor([5, 4, 0, 6, 3])
ids = torch.randint(1, 50, (5, 7))
mask = (torch.arange(7) < lengths[:, None]).float()
for step in range(3):
    given = mask if step == 2 else torch.ones_like(mask)
    loss = model(ids, given).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def localized(folder, beside):
    program = SCRIPT.replace("BESIDE", beside)
    investigated(folder / "script.py", program, on_failure="skip")
    (saved,) = sorted((folder / "script").glob("0*/report.json"))
    found = load_report(saved).localization
    assert found.first_bad.source.text.startswith("bias = ")
    return found


def test_an_overflow_in_each_sample_that_spoils_one(tmp_path):
    found = localized(tmp_path, "")
    assert [place.sample for place in found.positions] == [2]
    assert not found.in_every_sample


def test_one_that_spoils_others_on_another_way(tmp_path):
    found = localized(tmp_path, "+ 1e-3 * scores.amin((1, 2))[:, None].float()")
    assert found.positions is None or len(found.positions) == 5
