"""Lightning's loggers: nanstop's numbers in the rows of the training, and incidents, in real files.

In processes of their own, as `nanstop run` starts them.
"""

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

SCRIPT = """
import logging, sys, warnings
import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

warnings.filterwarnings("ignore")
LOGGERS = {
    "csv": lambda: CSVLogger("logs"),
    "tensorboard": lambda: TensorBoardLogger("logs"),
    "mlflow": lambda: MLFlowLogger(tracking_uri="sqlite:///mlflow.db", artifact_location="files"),
    "wandb": lambda: WandbLogger(offline=True, project="tried"),
}
kinds, bad = sys.argv[1].split(","), int(sys.argv[2])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch, at):
        (rows,) = batch
        loss = (self.net(rows) - rows.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, at):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


L.seed_everything(0, verbose=False)
rows = torch.randn(96, 8)
if bad >= 0:
    rows[8 * bad] = float("nan")
data = torch.utils.data.TensorDataset(rows)
loggers = [LOGGERS[kind]() for kind in kinds]
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=loggers, log_every_n_steps=1,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
net = Net()
loader = torch.utils.data.DataLoader(data, batch_size=8)
held_out = torch.utils.data.TensorDataset(torch.randn(8, 8))
trainer.fit(net, loader, torch.utils.data.DataLoader(held_out, batch_size=8))
assert all("log_metrics" not in vars(one) for one in loggers)
torch.save(net.state_dict(), "net.pt")
"""

TENSORBOARD = """
import glob, json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
(file,) = glob.glob("logs/**/events*", recursive=True)
events = EventAccumulator(file)
events.Reload()
print(json.dumps({
    "numbers": [tag for tag in events.Tags()["scalars"] if tag.startswith("nanstop/")],
    "texts": [
        one.tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"] if tag.startswith("nanstop/")
        for one in events.Tensors(tag)
    ],
}))
"""
MLFLOW = """
import json
from mlflow.artifacts import load_text
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///mlflow.db")
(run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
files = client.list_artifacts(run.info.run_id, "nanstop")
print(json.dumps({
    "numbers": [name for name in run.data.metrics if name.startswith("nanstop/")],
    "texts": [load_text(f"{run.info.artifact_uri}/{one.path}") for one in files],
}))
"""
READ = {"tensorboard": TENSORBOARD, "mlflow": MLFLOW}


def run(folder, *command):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "NANSTOP_DIR": str(folder / "nanstop"),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def fit(folder, kinds, bad, *, watched=True):
    (folder / "fit.py").write_text(SCRIPT)
    before = ("-m", "nanstop", "run") if watched else ()
    run(folder, *before, "fit.py", kinds, str(bad))
    return (folder / "net.pt").read_bytes()


def rows(folder):
    (file,) = folder.glob("logs/**/metrics.csv")
    with file.open() as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow  # two trainings in processes of their own
def test_numbers_stand_in_the_rows_of_the_training(tmp_path):
    fit(tmp_path, "csv", 5)
    found = rows(tmp_path)
    told = {int(row["step"]): row["nanstop/updates_left_out"] for row in found if row["loss"]}
    assert [told[step] for step in range(4)] == [""] * 4
    assert [float(told[step]) for step in range(6, 12)] == [1.0] * 6
    assert all(not row["nanstop/updates_left_out"] for row in found if row["val_loss"])


@pytest.mark.slow  # two trainings in processes of their own
def test_a_healthy_run_logs_the_same_bits_and_nothing_more(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "watched").mkdir()
    plain = fit(tmp_path / "plain", "csv", -1, watched=False)
    assert fit(tmp_path / "watched", "csv", -1) == plain
    assert rows(tmp_path / "watched") == rows(tmp_path / "plain")


@pytest.mark.slow  # two processes, one of them a training
@pytest.mark.parametrize("kind", READ)
def test_an_incident_is_found_in_the_logger_s_own_store(kind, tmp_path):
    if find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    fit(tmp_path, kind, 5)
    (tmp_path / "read.py").write_text(READ[kind])
    found = json.loads(run(tmp_path, "read.py").stdout.splitlines()[-1])
    assert "nanstop/incidents" in found["numbers"]
    (text,) = found["texts"]
    assert text.startswith("## error\\[NS50")
    assert "step 5" in text.splitlines()[0]
