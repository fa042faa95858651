"""Real processes that die in every way under ``nanstop run``: told apart, reported, their exit
codes their own.
"""

import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from dying_writer import write_without_end
from nanstop.commands.run.launch import launch
from nanstop.decide.policy import Policy
from nanstop.process.crash.flight_file import read
from nanstop.process.crash.standing_still import Patience
from nanstop.store.incidents import incident_folders, load_report, load_summary

TRAINING = """
import faulthandler, os, signal, sys, time
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())

net = nn.Sequential(Block(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
handle = torch.library.Library("dying", "DEF")
handle.define("gemm(Tensor a, Tensor b) -> Tensor")

def gemm(a, b):
    {fatal}
    return a @ b

handle.impl("gemm", gemm, "CPU")
for step in range(8):
    optimizer.zero_grad()
    rows = torch.randn(8, 4)
    if step == 5:
        with torch.no_grad():
            torch.ops.dying.gemm(rows, torch.randn(4, 16, dtype=torch.float32))
    net(rows).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def start(tmp_path, monkeypatch, capfd):
    """Return what runs a training that does ``fatal`` in step 5:
    (exit code, summary, report or None, stderr).
    """
    monkeypatch.chdir(tmp_path)

    def run(fatal, *, command=("train.py",), **options):
        (tmp_path / "train.py").write_text(TRAINING.replace("{fatal}", fatal))
        code = launch(command, policy=Policy(), out="out", **options)
        summary = load_summary("out/summary.json")
        report = load_report(f"out/{summary.incidents[-1].folder}") if summary.incidents else None
        return code, summary, report, capfd.readouterr().err

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fatal", "code", "name"),
    [
        ("signal.raise_signal(signal.SIGFPE)", 136, "SIGFPE"),
        pytest.param("faulthandler._sigsegv()", 139, "SIGSEGV", marks=pytest.mark.slow),
        pytest.param("os.abort()", 134, "SIGABRT", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    ],
)
def test_a_signal_becomes_an_incident_and_keeps_its_exit_code(start, fatal, code, name):
    got, summary, report, err = start(fatal)
    (row,) = summary.incidents
    assert (got, summary.exit, summary.ended) == (code, code, "signal")
    assert (row.code, row.step, row.op) == ("NS601", 5, None)
    assert report.incident.signals[0].name == name
    assert report.incident.facts.host == "loop"
    assert f"error[NS601]: process killed by {name}" in err
    if name != "SIGKILL":
        frame = next(one.message for one in report.incident.signals if one.name == "frame")
        assert frame.endswith("in gemm")


@pytest.mark.slow
def test_the_run_after_a_death_names_the_operation(start, tmp_path):
    start("signal.raise_signal(signal.SIGFPE)")
    _, summary, report, err = start("signal.raise_signal(signal.SIGFPE)")
    row = summary.incidents[-1]
    assert (row.code, row.op, row.step) == ("NS601", "dying.gemm.default", 5)
    last = report.localization.growth[-1]
    assert [(one.dtype, one.shape) for one in last.inputs] == [
        ("float32", (8, 4)),
        ("float32", (4, 16)),
    ]
    assert last.source.text == "torch.ops.dying.gemm(rows, torch.randn(4, 16, dtype=torch.float32))"
    assert "dying.gemm.default: float32 [8, 4] x float32 [4, 16]" in err
    before = report.localization.growth[:-1]
    assert "aten.sub_" in str(before) or "aten.add_" in str(before)
    assert start("pass")[:2][1].ended == "clean"
    assert not (tmp_path / "out" / "record-next-run").exists()


@pytest.mark.slow
def test_recorded_operations_have_modules_and_phases(start, tmp_path):
    """Killed in the middle of a backward, between the second module's part and the first's."""
    head, _, _ = TRAINING.partition("handle =")
    dies = (
        "hidden = net[0](torch.randn(8, 4))\n"
        "hidden.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))\n"
        "net[1](hidden).square().mean().backward()\n"
    )
    (tmp_path / "dies.py").write_text(head + dies)
    _, summary, report, _ = start("pass", command=("dies.py",), record=True)
    assert (summary.incidents[0].code, summary.incidents[0].step) == ("NS601", 0)
    seen = [(event.phase, event.module) for event in report.localization.growth]
    assert ("forward", "down") in seen
    assert seen[-1] == ("backward", "Linear")


@pytest.mark.slow
def test_a_launcher_reports_the_death_of_its_child(start):
    shell = ("bash", "-c", f"{shlex.quote(sys.executable)} train.py; exit 3")
    code, summary, report, _ = start("signal.raise_signal(signal.SIGFPE)", command=shell)
    assert (code, summary.ended) == (3, "signal")
    assert (summary.incidents[0].code, summary.incidents[0].step) == ("NS601", 5)
    assert report.incident.signals[0].name == "SIGFPE"


@pytest.mark.slow
def test_torchrun_reports_the_death_of_a_rank(start):
    command = ("torchrun", "--standalone", "--nproc-per-node=1", "train.py")
    code, summary, report, _ = start("os.kill(os.getpid(), signal.SIGKILL)", command=command)
    assert (code, summary.ended) == (1, "signal")
    assert report.incident.signals[0].name == "SIGKILL"
    assert summary.incidents[0].step == 5


@pytest.mark.slow
def test_want_of_memory_is_told(start):
    code, summary, report, err = start("torch.empty(2**58)")
    assert (code, summary.ended) == (1, "out_of_memory")
    assert (summary.incidents[0].code, summary.incidents[0].step) == ("NS604", 5)
    assert "can't allocate memory" in report.incident.signals[0].message
    assert err.index("Traceback") < err.index("error[NS604]")


def test_a_hang_is_ended_with_its_stacks(start, tmp_path):
    patience = Patience(steps=5, seconds=1.0, poll=0.2, grace=5.0)
    code, summary, report, err = start("time.sleep(120)", patience=patience)
    assert (code, summary.ended) == (143, "hang")
    assert (summary.incidents[0].code, summary.incidents[0].step) == ("NS605", 5)
    stacks = (tmp_path / "out" / summary.incidents[0].folder / "stacks.txt").read_text()
    assert "in gemm" in stacks
    assert "run stood still in `gemm`" in err
    assert report.incident.signals[0].message.startswith("no step for ")


@pytest.mark.slow
def test_what_comes_after_the_training_is_no_hang(start, tmp_path):
    patience = Patience(steps=2, seconds=0.3, poll=0.1)
    (tmp_path / "after.py").write_text(
        TRAINING.replace("{fatal}", "pass")
        + "import nanstop.hosts.script.autowatch as own\n"
        + "own._loops.controller.finish()\ntime.sleep(1.5)\n"
    )
    code, summary, _, _ = start("pass", command=("after.py",), patience=patience)
    assert (code, summary.ended) == (0, "clean")


@pytest.mark.slow
def test_an_ordinary_exception_is_no_incident(start):
    code, summary, report, err = start("raise ValueError('mine')")
    assert (code, summary.ended, report) == (1, "exception", None)
    *_, said, last = err.splitlines()
    assert said == "ValueError: mine"
    assert last == "nanstop: 5 steps watched, nothing found, ended early"


@pytest.mark.slow
def test_killed_at_fifty_random_moments_everything_left_is_whole(tmp_path):
    """The store always loads, and no record of it or of the flight file is half one thing and
    half another.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dying_writer"])
    moments = random.Random(0)
    num_reports = 0
    for trial in range(50):
        flight = tmp_path / f"{trial}.flight"
        victim = context.Process(target=write_without_end, args=(tmp_path / "store", flight))
        victim.start()
        while not flight.exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.12))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        found = read(flight)
        assert all(op.op == op.module == f"op{op.number}" for op in found.ops)
        assert [op.number for op in found.ops] == sorted(op.number for op in found.ops)
        if (tmp_path / "store" / "summary.json").exists():
            summary = load_summary(tmp_path / "store" / "summary.json")
            reports = {
                path.name: load_report(path) for path in incident_folders(tmp_path / "store")
            }
            assert all(reports[row.folder].count >= row.count for row in summary.incidents)
            num_reports = len(reports)
    assert num_reports > 30


def test_a_healthy_run_leaves_nothing_and_costs_no_more_than_a_note_a_step(start, tmp_path):
    code = textwrap.dedent(
        """
        import cProfile, pstats, sys
        from nanstop.process.crash.flight_file import FlightFile
        file = FlightFile(sys.argv[1])
        profile = cProfile.Profile()
        profile.enable()
        for step in range(100):
            file.step(step)
        profile.disable()
        print(pstats.Stats(profile).total_calls // 100)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.flight")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 20
    assert start("pass")[0] == 0
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["ended"] == "clean"


@pytest.mark.slow
def test_recording_changes_no_number(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    told = (
        TRAINING.replace("{fatal}", "pass")
        + "print([p.sum().item().hex() for p in net.parameters()])\n"
    )
    (tmp_path / "train.py").write_text(told)
    outputs = []
    for record in (False, True):
        assert launch(["train.py"], policy=Policy(), out="out", record=record) == 0
        outputs.append(capfd.readouterr().out)
    assert outputs[0] == outputs[1] != ""


def test_a_script_that_watches_itself_leaves_its_steps_too(start, tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, signal, torch, nanstop\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "with nanstop.watch(net, optimizer) as watch:\n"
        "    for step in range(3):\n"
        "        watch.step(lambda rows: net(rows).square().mean(), torch.ones(2, 4))\n"
        "        watch.update()\n"
        "    signal.raise_signal(signal.SIGFPE)\n"
    )
    code, summary, report, _ = start("pass", command=("own.py",))
    assert (code, summary.incidents[0].step) == (136, 3)
    assert report.incident.facts.optimizer.name == "SGD"


TRAINER = """
import os, signal
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Killer(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)

model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
))
ids = torch.arange(3, 11)
args = TrainingArguments(
    output_dir="out", max_steps=3, report_to=[], save_strategy="no", use_cpu=True
)
rows = [{"input_ids": ids, "labels": ids}] * 8
Trainer(model=model, args=args, train_dataset=rows, callbacks=[Killer()]).train()
"""


@pytest.mark.slow
def test_the_facts_of_a_trainer_outlive_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINER)
    assert launch(("train.py",), policy=Policy(), out="out") == 137
    (row,) = load_summary("out/summary.json").incidents
    facts = load_report(f"out/{row.folder}").incident.facts
    assert (facts.host, facts.model_type) == ("Trainer", "qwen2")
    assert [group.dtype for group in facts.param_groups] == ["float32"]
