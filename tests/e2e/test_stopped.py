"""A training that nanstop stops is no success:
what train() raises, what is written down, how a watched command ends.
"""

import copy
import json
import math
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hf_cases as cases
import nanstop
import tiny
from e2e.scripts import HEAD, run
from e2e.test_trainers import InOrder, Points, assert_finite, points
from versions import needs

ALWAYS = range(64)


def watched(trainer, **policy):
    watch = nanstop.watch(trainer, policy=nanstop.Policy(**policy), out=trainer.args.output_dir)
    cases.seed()
    return watch


def summary_of(watch):
    return json.loads((watch.folder / "summary.json").read_text())


def test_train_raises_when_the_host_has_ended_it(tmp_path):
    ended = []

    class Ended(TrainerCallback):
        def on_train_end(self, args, state, control, **details):
            ended.append(state.global_step)

    trainer = points(tmp_path, (13,))
    trainer.add_callback(Ended())
    watch = watched(trainer, on_failure="stop")
    with pytest.raises(nanstop.TrainingStopped, match="the policy is to stop") as caught:
        trainer.train()
    assert isinstance(caught.value, nanstop.NanstopError)
    (report,) = watch.incidents
    assert caught.value.incident == report.incident.id
    assert caught.value.hint.endswith(f"`nanstop report {watch.folder / report.incident.id}`")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.incident) == (str(caught.value), report.incident.id)
    assert ended == [2] == [trainer.state.global_step]
    found = summary_of(watch)
    assert (found["ended"], found["exit"], found["steps"]) == ("stopped", 3, 2)
    assert "2 steps in" in str(watch.report())
    assert "then stopped, 1 incident" in str(watch.report())
    assert_finite(trainer)


def test_it_can_end_as_by_early_stopping(tmp_path):
    trainer = points(tmp_path, (13,))
    watch = watched(trainer, on_failure="stop", on_stop="end")
    assert trainer.train().global_step == 2
    found = summary_of(watch)
    assert (found["ended"], found["exit"], found["steps"]) == ("stopped", 3, 2)


def test_a_next_training_is_not_the_stopped_one(tmp_path):
    trainer = points(tmp_path, (13,))
    watch = watched(trainer, on_failure="stop", on_stop="end")
    trainer.train()
    trainer.train_dataset.bad = ()
    trainer.train()
    found = summary_of(watch)
    assert (found["ended"], found["exit"], found["steps"]) == (None, 0, 8)


def test_a_host_that_passes_its_own_door_by_is_stopped_at_its_next_step(tmp_path):
    class Deaf(TrainerCallback):
        def on_step_end(self, args, state, control, **details):
            control.should_training_stop = False

    trainer = points(tmp_path, (13,))
    trainer.add_callback(Deaf())
    watch = watched(trainer, on_failure="stop")
    with pytest.raises(nanstop.TrainingStopped, match="the policy is to stop"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert summary_of(watch)["ended"] == "stopped"


def test_an_evaluation_that_fails_stops_a_run_that_is_to_stop(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Points((5,), size=16)}
    trainer = points(tmp_path, **settings)
    watch = watched(trainer, on_failure="stop")
    with pytest.raises(nanstop.TrainingStopped, match="the policy is to stop"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert summary_of(watch)["incidents"][0]["phase"] == "evaluate"


def test_a_run_that_goes_on_losing_is_stopped(tmp_path):
    trainer = points(tmp_path, ALWAYS, max_steps=40)
    watch = watched(trainer)
    with pytest.raises(nanstop.TrainingStopped, match="32 updates in a row were skipped"):
        trainer.train()
    assert trainer.state.global_step == 33
    assert summary_of(watch)["steps"] == 33


@needs("transformers", "5.0", "begins the state of a training in a method of its own")
def test_a_trial_of_a_search_ends_and_the_search_goes_on(tmp_path):
    trainer = points(tmp_path, (13,))
    watch = watched(trainer, on_failure="stop")
    trainer.hp_search_backend = None
    init = trainer._init_training_state

    def as_a_trial(*args, **details):
        found = init(*args, **details)
        trainer.state.is_hyper_param_search = True
        return found

    trainer._init_training_state = as_a_trial
    assert trainer.train().global_step == 2
    assert summary_of(watch)["ended"] == "stopped"


# ---- loops


def loop(folder, *, bad=True, **policy):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    done = []
    with nanstop.watch(model, optimizer, policy=nanstop.Policy(**policy), out=folder) as w:
        for step in range(4):
            x = torch.randn(3, 4)
            if bad and step == 2:
                x[0] = math.nan
            w.step(lambda x: F.mse_loss(model(x), x.sum(1, keepdim=True)), x)
            w.update()
            done.append(step)
    return done, summary_of(w)


def test_a_loop_raises_at_the_update(tmp_path):
    with pytest.raises(nanstop.TrainingStopped, match="the policy is to stop"):
        loop(tmp_path, on_failure="stop")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["ended"], found["exit"], found["steps"]) == ("stopped", 3, 2)


def test_a_loops_block_can_end_instead(tmp_path):
    done, found = loop(tmp_path, on_failure="stop", on_stop="end")
    assert done == [0, 1]
    assert (found["ended"], found["exit"], found["steps"]) == ("stopped", 3, 2)
    done, found = loop(tmp_path, bad=False, on_failure="stop", on_stop="end")
    assert (done, found["ended"], found["exit"]) == ([0, 1, 2, 3], None, 0)


@pytest.mark.parametrize("on_stop", ["raise", "end"])
def test_a_last_update_that_breaks_weights_stops_a_loop_as_well(tmp_path, on_stop):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    policy = nanstop.Policy(on_failure="stop", on_stop=on_stop)
    stops = pytest.raises(nanstop.TrainingStopped) if on_stop == "raise" else nullcontext()
    with stops, nanstop.watch(model, optimizer, policy=policy, out=tmp_path) as w:
        w.step(lambda x: model(x).square().mean(), torch.randn(3, 4))
        w.update()
        model.weight.data[0, 0] = math.nan
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["ended"], found["exit"]) == ("stopped", 3)
    with (
        pytest.raises(KeyError, match="own"),
        nanstop.watch(model, optimizer, policy=policy, out=tmp_path) as w,
    ):
        raise KeyError("own")


# ---- nanstop run

LOOP = (
    HEAD
    + """
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)

def train():
    for step in range(4):
        x = torch.randn(3, 4)
        if BAD and step == 2:
            x[0] = float("nan")
        optimizer.zero_grad()
        F.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
"""
)
TRAINER = """
import sys, torch
sys.path[:0] = {tests!r}
from e2e.test_trainers import points

trainer = points("out", (13,))
trainer.train()
torch.save(trainer.model.state_dict(), "model.pt")
print("saved")
"""


def ends(folder, tail, *options, source=LOOP, command=("loop.py", "bad")):
    (folder / "loop.py").write_text(source + tail)
    return run(folder, *command, options=("--on-failure", "stop", *options))


def test_a_watched_loop_that_is_stopped_ends_with_3(tmp_path):
    found = ends(tmp_path, "train()\nprint('saved')")
    assert found.code == 3
    assert b"saved" not in found.out
    assert "TrainingStopped: error[NS501]: training stopped" in found.err
    (folder,) = re.findall(r"help: .* `nanstop report (\S+)`", found.err)
    assert (tmp_path / folder / "report.json").is_file()
    assert "nanstop/adapters" not in found.err
    assert "optimizer.step()" in found.err
    said = found.summary
    assert (said["ended"], said["exit"], said["steps"]) == ("stopped", 3, 2)


@pytest.mark.slow
def test_a_stop_in_a_thread_or_at_the_scripts_end_is_one_that_nobody_caught(tmp_path):
    tail = (
        "import threading\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()"
    )
    found = ends(tmp_path, f"{tail}\nprint('saved')")
    assert (found.code, found.summary["ended"], found.summary["exit"]) == (3, "stopped", 3)
    assert b"saved" in found.out  # what the script goes on with is its own
    last = LOOP.replace("optimizer.step()", "optimizer.step()\n        spoil(step)")
    tail = (
        "def spoil(step):\n    if step == 3:\n        net.weight.data[0, 0] = float('nan')\n"
        "BAD = False\ntrain()\nprint('saved')"
    )
    found = ends(tmp_path, tail, source=last)
    assert (found.code, found.summary["ended"], found.summary["exit"]) == (3, "stopped", 3)
    assert "Traceback" not in found.err


@pytest.mark.slow
def test_a_script_that_catches_it_has_an_exit_code_of_its_own(tmp_path):
    tail = (
        "import nanstop\ntry:\n    train()\nexcept nanstop.TrainingStopped:\n    sys.exit({code})"
    )
    found = ends(tmp_path, tail.format(code=0))
    assert (found.code, found.summary["ended"], found.summary["exit"]) == (0, "clean", 0)
    assert found.rows[0]["action"] == "stop"
    found = ends(tmp_path, tail.format(code=7))
    assert (found.code, found.summary["exit"]) == (7, 7)


@pytest.mark.slow
def test_a_watched_trainer_that_is_stopped_ends_with_3(tmp_path):
    import sys

    source = TRAINER.format(tests=[one for one in sys.path if one.endswith("tests")])
    found = ends(tmp_path, "", source=source, command=("loop.py",))
    assert (found.code, found.summary["ended"]) == (3, "stopped")
    assert b"saved" not in found.out
    found = ends(tmp_path, "", "--on-stop", "end", source=source, command=("loop.py",))
    assert (found.code, found.summary["ended"], found.summary["exit"]) == (3, "stopped", 3)
    assert b"saved" in found.out
    assert (found.summary["steps"], found.rows[0]["action"]) == (2, "stop")
    launcher = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu", "loop.py")
    found = ends(tmp_path, "", source=source, command=launcher)
    assert (found.code, found.summary["ended"]) == (3, "stopped")


# ---- the log of a run that only fails


class Repeated(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.row = torch.randint(0, 100, (128,))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index):
        return {"input_ids": self.row, "labels": self.row}


@pytest.mark.slow
def test_the_log_filter_shows_what_it_shows_without_nanstop(tmp_path):
    """transformers' own test_logging_inf_nan_filter, watched under the default policy."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=100, n_positions=128, n_embd=32, n_layer=3, n_head=4, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model, data = GPT2LMHeadModel(config), Repeated()
    logged = {}
    for filtered in (False, True):
        given = tiny.training_args(tmp_path / str(filtered)) | {
            "learning_rate": 1e9,
            "logging_steps": 5,
            "logging_nan_inf_filter": filtered,
            "max_steps": -1,
            "num_train_epochs": 3,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
        }
        trainer = Trainer(model, TrainingArguments(**given), train_dataset=data)
        watch = nanstop.watch(trainer, out=tmp_path / str(filtered))
        trainer.train()
        assert trainer.state.global_step == 24
        logged[filtered] = [entry["loss"] for entry in trainer.state.log_history[:-1]]
        assert watch.incidents[0].audit[-1].action.kind == "skip"
    assert not all(map(math.isfinite, logged[False]))
    assert all(map(math.isfinite, logged[True]))
    assert_finite(trainer)


def test_a_loss_that_was_left_out_is_logged_as_the_host_logs_it_and_no_longer(tmp_path):
    trainer = points(tmp_path, (13,), logging_nan_inf_filter=False, logging_steps=2)
    watched(trainer, on_failure="skip")
    trainer.train()
    assert isinstance(trainer, InOrder)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [math.isfinite(one) for one in losses] == [False, True, True, True]


# ---- another training after a wreck


def wrecked(folder, *, finite=False):
    """A model that a training has wrecked: its weights are far too large, or not even finite."""
    rate, on_failure = (1e18, "skip") if finite else (1e37, "observe")
    model = tiny.llama()
    trainer = Trainer(model, TrainingArguments(**tiny.training_args(
        folder / "first", learning_rate=rate, max_steps=3, optim="sgd", max_grad_norm=1.0,
    )), train_dataset=tiny.TokenRows())  # fmt: skip
    watched(trainer, on_failure=on_failure)
    trainer.train()
    assert finite == all(bool(p.isfinite().all()) for p in model.parameters())
    return model


def trained_again(model, folder):
    args = TrainingArguments(**tiny.training_args(folder, max_steps=2))
    watch = watched(Trainer(model, args, train_dataset=tiny.TokenRows()))
    watch._inner.trainer.train()
    return watch


@pytest.mark.parametrize(
    ("finite", "through"),
    [
        (True, "itself"),
        (False, "a file"),
        pytest.param(False, "itself", marks=pytest.mark.slow),
        pytest.param(False, "a copy", marks=pytest.mark.slow),
        pytest.param(True, "a file", marks=pytest.mark.slow),
    ],
)
def test_what_a_training_wrecked_was_not_loaded_so(tmp_path, capfd, finite, through):
    model = wrecked(tmp_path, finite=finite)
    if through == "a copy":
        model = copy.deepcopy(model)
    elif through == "a file":
        model.save_pretrained(tmp_path / "saved")
        model = type(model).from_pretrained(tmp_path / "saved")
    capfd.readouterr()
    watch = trained_again(model, tmp_path)
    said = capfd.readouterr().err
    assert "an earlier training in this process left" in said
    assert not {"NS105", "NS106"} & {one.code for one in watch.findings}
    found = {one.code for report in watch.incidents for one in report.diagnoses}
    assert found
    assert not {"NS105", "NS106"} & found
    assert "as they were loaded" not in said
    assert "crash" not in said
    if not finite:
        assert "before the first step: an earlier training in this process left them so" in said


def test_weights_that_are_loaded_after_a_training_are_judged_as_ever(tmp_path):
    model = wrecked(tmp_path)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state["model.norm.weight"][3] = math.nan
    model.load_state_dict(state)
    watch = trained_again(model, tmp_path)
    assert "NS106" in {one.code for report in watch.incidents for one in report.diagnoses}
