"""nanstop's own numbers in what tracks a run: with the training logs, and nowhere else."""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import TrainerCallback

import hf_cases
import nanstop
from nanstop.hosts.trackers import Incidents, Note
from nanstop.hosts.trainer.callbacks import Trackers, is_tracker
from nanstop.records import Report
from nanstop.report.text.issue import issue
from nanstop.session.history import History
from nanstop.session.off import OffSession
from report.specimens import REPORT

OWN = {"nanstop/headroom_bits": 9.5, "nanstop/incidents": 1.0}


class Tracker(TrainerCallback):
    """Keeps what it is given, from where transformers keeps its trackers."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append((state.global_step, dict(logs)))


Tracker.__module__ = "transformers.integrations.integration_utils"


class Shown(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append(dict(logs))


def test_numbers_come_with_training_logs_to_trackers_alone(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, logging_steps=1)
    tracker, shown = Tracker(), Shown()
    trainer.add_callback(tracker)
    trainer.add_callback(shown)
    trackers = Trackers(lambda: OWN)
    trackers.begin(trainer)
    trackers.begin(trainer)
    trainer.log({"loss": 1.0})
    trainer.log({"eval_loss": 2.0})
    assert tracker.seen == [(0, {"loss": 1.0} | shown_rest(shown, 0) | OWN), (0, shown.seen[1])]
    assert not any(name.startswith("nanstop/") for entry in shown.seen for name in entry)
    assert not any(
        name.startswith("nanstop/") for entry in trainer.state.log_history for name in entry
    )
    trackers.end()
    assert "on_log" not in vars(tracker)
    assert is_tracker(tracker)
    assert not is_tracker(shown)


def shown_rest(shown, at):
    return {name: value for name, value in shown.seen[at].items() if name != "loss"}


def test_a_healthy_float32_run_tells_trackers_nothing_more(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, logging_steps=1)
    tracker = Tracker()
    trainer.add_callback(tracker)
    with nanstop.watch(trainer, out=tmp_path / "found"):
        trainer.train()
    assert [step for step, logs in tracker.seen if "loss" in logs] == [1, 2, 3, 4, 5]
    assert not any(name.startswith("nanstop/") for _, logs in tracker.seen for name in logs)


def test_a_loop_s_log_is_called_where_a_number_has_changed(tmp_path):
    told = []
    train(tmp_path, lambda numbers, step: told.append((step, dict(numbers))))
    assert told[0][0] == 5
    assert told[0][1]["nanstop/updates_left_out"] == 1.0
    assert told[0][1]["nanstop/incidents"] == 1.0
    assert len(told) == 1


def test_a_log_that_raises_is_not_called_again(tmp_path, caplog):
    calls = []

    def log(numbers, step):
        calls.append(step)
        raise OSError("the disk is full")

    train(tmp_path, log, bad=(5, 7))
    assert calls == [5]
    assert "`log` is not called again (OSError: the disk is full)" in caplog.text


def test_a_loop_is_told_its_loss_scale_when_it_moves(tmp_path):
    told = []
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)

    def log(numbers, step):
        told.append((step, dict(numbers)))

    with nanstop.watch(model, optimizer, out=tmp_path, log=log) as watch:
        for _ in range(12):
            watch.step(lambda rows: model(rows).square().mean(), torch.randn(4, 8))
            watch.update(clip=1.0, scaler=scaler)
    assert told[0] == (0, {"nanstop/loss_scale": 8.0})
    assert told[-1][1] == {"nanstop/loss_scale": 32.0}
    assert 10 <= told[-1][0] < 12


def test_what_lies_on_a_device_is_read_for_a_row_that_is_logged_alone():
    history = History()
    assert history.last_number("scale") is None
    history.add("scale", 0, torch.tensor(4.0))
    assert history.last_number("scale") == 4.0
    history.add("scale", 1, torch.empty((), device="meta"))
    assert history.last_number("scale") is None
    with pytest.raises(RuntimeError, match="meta"):
        history.last_number("scale", reads=True)


def train(folder, log, bad=(5,)):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with nanstop.watch(model, optimizer, out=folder, policy="skip", log=log) as watch:
        for step in range(10):
            batch = torch.randn(8, 4)
            if step in bad:
                batch[1] = float("nan")
            watch.step(lambda rows: model(rows).square().mean(), batch)
            watch.update()


SCRIPT = """
import sys
import torch
import nanstop
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
)).half()
ids = torch.arange(3, 11)
args = TrainingArguments(
    output_dir="out", max_steps=4, logging_steps=1, report_to=[sys.argv[1]], optim="sgd",
    save_strategy="no", disable_tqdm=True, use_cpu=True, run_name="tried", project="tried",
)


class Failing(Trainer):
    def compute_loss(self, *given, **options):
        loss = super().compute_loss(*given, **options)
        bad = sys.argv[2] == "fails" and self.state.global_step == 2
        return loss * (float("inf") if bad else 1.0)


trainer = Failing(model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
nanstop.watch(trainer, policy="skip")
trainer.train()
assert not any(name.startswith("nanstop/") for row in trainer.state.log_history for name in row)
"""

READ = {
    "tensorboard": """
import glob, json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
files = glob.glob("out/runs/**/events*", recursive=True)
found = {}
for file in files:
    events = EventAccumulator(file)
    events.Reload()
    for tag in events.Tags()["scalars"]:
        found[tag] = [[one.step, one.value] for one in events.Scalars(tag)]
print(json.dumps(found))
""",
    "wandb": """
import glob, json, struct
from wandb.proto import wandb_internal_pb2 as proto

BLOCK, HEAD = 32768, struct.Struct("<IHB")
(file,) = glob.glob("wandb/offline-run-*/*.wandb")
data, at, record, found = open(file, "rb").read(), 7, b"", {}
while at + HEAD.size <= len(data):  # a log of LevelDB
    if BLOCK - at % BLOCK < HEAD.size:
        at += BLOCK - at % BLOCK
        continue
    _, length, kind = HEAD.unpack_from(data, at)
    at += HEAD.size
    record += data[at : at + length]
    at += length
    if kind not in (1, 4):
        continue
    told = proto.Record.FromString(record)
    record = b""
    row = {
        (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
        for item in told.history.item
    }
    for name, value in row.items():
        found.setdefault(name, []).append([row.get("train/global_step"), value])
print(json.dumps(found))
""",
    "mlflow": """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///mlflow.db")
(run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
print(json.dumps({
    name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
    for name in run.data.metrics
}))
""",
    "trackio": """
import glob, json, sqlite3
(file,) = [one for one in glob.glob("trackio/*.db") if "tried" in one]
rows = sqlite3.connect(file).execute("select metrics from metrics").fetchall()
found = {}
for (text,) in rows:
    row = json.loads(text)
    for name, value in row.items():
        found.setdefault(name, []).append([row.get("train/global_step"), value])
print(json.dumps(found))
""",
}
LOCAL = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def run(command, folder, env):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READ)
def test_a_float16_run_is_found_in_the_tracker_s_own_store(tracker, tmp_path):
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "read.py").write_text(READ[tracker])
    given = {**os.environ, **LOCAL, "TRACKIO_DIR": str(tmp_path / "trackio")}
    for command in (["train.py", tracker, "healthy"], ["read.py"]):
        done = run(command, tmp_path, given)
    found = json.loads(done.stdout.splitlines()[-1])
    before = "" if tracker == "mlflow" else "train/"
    steps = [step for step, _ in found[f"{before}loss"]]
    rooms = [value for _, value in found[f"{before}nanstop/headroom_bits"]]
    assert steps == [1, 2, 3, 4]
    assert all(0.0 < room < 16.0 for room in rooms)


INCIDENTS = {
    "tensorboard": """
import glob, json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = []
for file in glob.glob("out/runs/**/events*", recursive=True):
    events = EventAccumulator(file)
    events.Reload()
    for tag in events.Tags()["tensors"]:
        if tag.startswith("nanstop/incident"):
            found += [one.tensor_proto.string_val[0].decode() for one in events.Tensors(tag)]
print(json.dumps(found))
""",
    "wandb": READ["wandb"]
    .replace(
        "row = {",
        """if told.HasField("alert"):
        alerts.append([told.alert.title, told.alert.text])
    if told.HasField("artifact") and told.artifact.type == "nanstop-incident":
        (entry,) = told.artifact.manifest.contents
        artifacts.append(open(entry.local_path).read())
    row = {""",
    )
    .replace("found = {}", "found = {}", 1)
    .replace("BLOCK, HEAD", "alerts, artifacts = [], []\nBLOCK, HEAD", 1)
    .replace("print(json.dumps(found))", "print(json.dumps([alerts[0][1], *artifacts]))"),
    "mlflow": """
import json
from mlflow.artifacts import load_text
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///mlflow.db")
(run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
files = client.list_artifacts(run.info.run_id, "nanstop")
print(json.dumps([load_text(f"{run.info.artifact_uri}/{one.path}") for one in files]))
""",
    "trackio": """
import glob, json, sqlite3
(file,) = [one for one in glob.glob("trackio/*.db") if "tried" in one]
rows = sqlite3.connect(file).execute("select text from alerts").fetchall()
print(json.dumps([text for (text,) in rows]))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("tracker", INCIDENTS)
def test_an_incident_is_found_in_the_tracker_s_own_store(tracker, tmp_path):
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "read.py").write_text(INCIDENTS[tracker])
    given = {**os.environ, **LOCAL, "TRACKIO_DIR": str(tmp_path / "trackio")}
    for command in (["train.py", tracker, "fails"], ["read.py"]):
        done = run(command, tmp_path, given)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    for text in found:
        assert text.startswith("## error\\[NS")
        assert "step 2," in text.splitlines()[0]
        assert str(tmp_path) not in text


def test_a_tracker_that_refuses_an_incident_is_asked_once(caplog):
    told, run = [], OffSession()
    run.announce = told.append

    def refuse(note):
        random.random()
        raise OSError("no network")

    incidents = Incidents(lambda: [("one", refuse), ("other", told.append)])
    incidents.follow(run)
    random.seed(0)
    before = random.getstate()
    for _ in range(2):
        run.announce(REPORT)
    run.announce("a note")
    assert random.getstate() == before
    assert [one if isinstance(one, str) else type(one) for one in told] == [
        *(Report, Note, Report, Note),
        "a note",
    ]
    assert told[1].step == REPORT.incident.at.step
    assert told[1].text == issue(REPORT)
    assert caplog.text.count("one was not given an incident (OSError: no network)") == 1
    incidents.end()
    assert run.announce == told.append
