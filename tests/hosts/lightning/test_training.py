"""Trainings of Lightning's own Trainer under `nanstop run`: left as they are in health, repaired
before the update where that can be.

In processes of their own, as `nanstop run` starts them.
"""

from importlib.util import find_spec

import pytest

from lightning_runs import ended

pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.slow,  # trainings in processes of their own
]

SCRIPT = """
import hashlib, json, logging, math, sys, warnings
import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
fault, *modes = sys.argv[1:]
half = torch.half if fault == "half" else torch.float


class Loud(torch.nn.Module):
    def forward(self, x):
        large = x * 64
        wide = large.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()).to(x.dtype)


class Rows(torch.utils.data.Dataset):
    def __init__(self, num, bad):
        self.num, self.bad = num, bad

    def __len__(self):
        return self.num

    def __getitem__(self, place):
        x = torch.randn(8, generator=torch.Generator().manual_seed(place))
        y = x.sum().clamp(-2, 2)
        if place == 43 and fault == "half":
            x *= 4000
        if place == self.bad:
            x[2] = math.nan
        return x.to(half), y.to(half)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.loud = torch.nn.Linear(8, 16), Loud()
        self.last, self.losses = torch.nn.Linear(16, 1), []

    def forward(self, x):
        return self.last(self.loud(self.first(x))).squeeze(-1)

    def error(self, batch):
        return (self(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, at):
        loss = self.error(batch)
        self.losses.append(str(loss.item()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, at):
        self.log("val_loss", self.error(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


KNOWN = {
    "accumulate": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 1.0},
    "mixed": {"precision": "bf16-mixed"},
}
options = {}
for mode in modes:
    options |= KNOWN[mode]
L.seed_everything(0, verbose=False)
net = Net().to(half)
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=CSVLogger("logs"), log_every_n_steps=1,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
)
held_out = Rows(16, 3 if fault == "held_out" else -1)
loaders = [torch.utils.data.DataLoader(rows, batch_size=8) for rows in (Rows(96, -1), held_out)]
trainer.fit(net, *loaders)
weights = b"".join(p.detach().float().numpy().tobytes() for p in net.parameters())
print(json.dumps([hashlib.sha256(weights).hexdigest(), net.losses]))
"""


def fit(folder, *words, watched=True):
    """Return what a training came to, and the rows of its summary."""
    said, rows, _ = ended(folder, SCRIPT, *words, watched=watched)
    return said, rows


@pytest.mark.parametrize("modes", [(), ("accumulate", "clip"), ("mixed",)], ids="-".join)
def test_a_healthy_training_is_bitwise_equal(tmp_path, modes):
    plain, _ = fit(tmp_path / "plain", "none", *modes, watched=False)
    watched, rows = fit(tmp_path / "watched", "none", *modes)
    assert watched == plain
    assert rows == ()


@pytest.mark.parametrize("modes", [(), ("clip",), ("clip", "accumulate")], ids="-".join)
def test_a_step_is_made_anew_before_the_update(tmp_path, modes):
    (_, losses), (row,) = fit(tmp_path / "run", "half", *modes)
    place = int("accumulate" in modes)
    assert (row.code, row.module, row.micro) == ("NS201", "loud", place)
    assert row.action == "redo"
    assert row.step == (2 if place else 5)
    assert losses[6:] == [one for one in losses[6:] if one not in ("nan", "inf")]


def test_an_evaluation_is_watched(tmp_path):
    plain, _ = fit(tmp_path / "plain", "held_out", watched=False)
    watched, (row,) = fit(tmp_path / "run", "held_out")
    assert watched == plain
    assert (row.code, row.module, row.action) == ("NS501", "first", "observe")
