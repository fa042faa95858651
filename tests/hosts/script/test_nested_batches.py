"""A model that is given a nested tensor, whose rows differ in length: its second length is a symbol
that is no number.
"""

import torch

from loop_scripts import investigated, run_script, same
from nanstop.records import Report
from nanstop.replay.batches import batch_facts, num_samples

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 30)

    def forward(self, ids):
        rows = self.rows(ids).values()
        return self.head(rows / rows.pow(2).mean(-1, keepdim=True).sqrt())

torch.manual_seed(0)
model = Net()
PARAMETERS = list(model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    texts = [torch.arange(1, num + 2) + step for num in (3, 5, 2)]
    if BAD and step == 2:
        texts[1][1] = 0
    ids = torch.nested.nested_tensor([text[:-1] for text in texts], layout=torch.jagged)
    loss = functional.cross_entropy(model(ids), torch.cat([text[1:] for text in texts]))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


def _reports(news):
    return [one for one in news if isinstance(one, Report)]


def test_a_failure_of_a_nested_batch_is_told_at_its_line(tmp_path):
    _, news = investigated(tmp_path / "bad.py", SCRIPT, BAD=True)
    (report,) = _reports(news)
    assert report.diagnoses[0].code == "NS206"
    assert report.localization.first_bad.source.text.startswith("return self.head(rows / rows")
    assert report.incident.batch[0].shape == ()


def test_a_healthy_run_is_watched_and_left_as_it_is(tmp_path):
    plain = run_script(tmp_path / "plain.py", SCRIPT, BAD=False)
    watched, news = investigated(tmp_path / "watched.py", SCRIPT, BAD=False)
    assert not [one for one in news if isinstance(one, str)]
    assert not _reports(news)
    assert same(plain["PARAMETERS"], watched["PARAMETERS"])


def test_where_rows_begin_is_no_number_of_a_nested_batch():
    ids = torch.nested.nested_tensor(
        [torch.tensor([1, 2]), torch.tensor([3] * 9)], layout=torch.jagged
    )
    (fact,) = batch_facts({"ids": ids}, 0)
    assert (fact.shape, fact.minimum, fact.maximum) == ((), 1.0, 3.0)
    assert num_samples({"ids": ids}) is None
