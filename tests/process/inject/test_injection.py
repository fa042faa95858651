"""``nanstop run``: real child processes, watched from their first import;
streams and exit codes stay their own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanstop.commands.run.launch import GRACE_SECONDS, launch
from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.process.children.command import resolve_command
from nanstop.process.inject.variables import INJECTION, watched_policy, watching

LOOP = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    rows = torch.randn(8, 4)
    if step == 2 and "bad" in sys.argv:
        rows = rows / (rows - rows)
    optimizer.zero_grad()
    loss = net(rows).square().mean()
    loss.backward()
    optimizer.step()
print("finite", all(p.isfinite().all().item() for p in net.parameters()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder with the script ``loop.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def run(*command, **options):
    """Launch under ``nanstop run``'s own function, in a process of its own:
    (exit code, stdout, stderr, summary).
    """
    code = (
        "import sys; from nanstop.commands.run.launch import launch; "
        "from nanstop.decide.policy import Policy; "
        f"sys.exit(launch(sys.argv[1:], policy=Policy(), out='incidents', **{options!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, summary()


def summary():
    return json.loads(Path("incidents/summary.json").read_text())


def test_a_healthy_script_leaves_an_empty_summary(folder):
    code, out, err, rows = run("loop.py")
    assert (code, out, err) == (0, "finite True\n", "nanstop: 4 steps watched, nothing found\n")
    assert (rows["incidents"], rows["findings"], rows["exit"], rows["steps"]) == ([], [], 0, 4)
    assert [p.name for p in (folder / "incidents").iterdir()] == ["summary.json"]


def test_a_failing_loop_is_caught_localized_and_finishes(folder):
    code, out, err, rows = run("loop.py", "bad")
    assert (code, out) == (0, "finite True\n")
    (row,) = rows["incidents"]
    assert (row["step"], row["micro"], row["action"]) == (2, 0, "skip")
    assert row["source"].endswith("loop.py:13")
    assert row["code"] == "NS204"
    assert "error[NS204]" in err
    assert (folder / "incidents" / row["folder"] / "report.json").is_file()


@pytest.mark.slow
def test_a_warning_inside_an_op_is_shown_at_the_scripts_line(folder):
    lonely = "loss = net(rows).square().mean() + rows[:1].std(0).nan_to_num().sum()"
    (folder / "lonely.py").write_text(LOOP.replace("loss = net(rows).square().mean()", lonely))
    alone = subprocess.run(
        [sys.executable, "lonely.py"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "UserWarning: std()" in alone.stderr
    code, out, err, _ = run("lonely.py")
    assert (code, out) == (0, alone.stdout)
    assert re.fullmatch(r"nanstop: \d+ steps watched, nothing found\n", err[len(alone.stderr) :])
    assert err.startswith(alone.stderr)


@pytest.mark.slow
def test_a_module_is_watched_as_well(folder):
    code, out, _, rows = run("-m", "loop", "bad")
    assert (code, out, len(rows["incidents"])) == (0, "finite True\n", 1)


@pytest.mark.parametrize(
    ("body", "code", "shown"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_how_a_script_ends_stays_its_own(folder, body, code, shown):
    (folder / "ends.py").write_text(body)
    got, _, err, rows = run("ends.py")
    assert (got, rows["exit"]) == (code, code)
    assert shown in err
    assert "nanstop" not in err.replace(str(folder), "")


def test_a_training_that_is_interrupted_dies_of_it(folder):
    (folder / "stops.py").write_text(f"{LOOP}\nraise KeyboardInterrupt\n")
    code, _, err, rows = run("stops.py", "bad")
    assert (code, rows["exit"], len(rows["incidents"])) == (130, 130, 1), err


@pytest.mark.slow
def test_the_traceback_of_a_numeric_exception_is_the_scripts(folder):
    (folder / "ids.py").write_text(
        "import torch\n"
        "net = torch.nn.Embedding(4, 2)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "net(torch.tensor([7])).sum().backward()\n"
    )
    code, _, err, rows = run("ids.py")
    assert code == 1
    assert err.splitlines()[-2] == "IndexError: index out of range in self"
    assert len(rows["incidents"]) == 1


@pytest.mark.slow
def test_a_traceback_of_the_script_shows_none_of_our_frames(folder):
    (folder / "shapes.py").write_text(
        "import torch\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "try:\n"
        "    net(torch.ones(3, 3))\n"
        "except RuntimeError as error:\n"
        "    raise ValueError('shapes') from error\n"
    )
    alone = subprocess.run(
        [sys.executable, "shapes.py"], capture_output=True, text=True, check=False
    )
    code, _, err, _ = run("shapes.py")
    assert (code, err) == (1, alone.stderr)


def test_a_run_in_which_nothing_was_watched_says_so(folder):
    (folder / "idle.py").write_text("print('idle')\n")
    for command in (["idle.py"], [sys.executable, "-I", "loop.py", "bad"]):
        code, _, err, rows = run(*command)
        assert (code, rows["steps"]) == (0, 0)
        assert err.startswith("nanstop: nothing was watched")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_child(folder, number, code):
    (folder / "waits.py").write_text(
        "import time, pathlib\npathlib.Path('ready').touch()\ntime.sleep(60)\n"
    )
    with started("waits.py", folder / "ready") as parent:
        parent.send_signal(number)
        assert parent.wait(timeout=30) == code
    assert summary()["exit"] == code


def test_a_signal_that_comes_twice_reaches_the_child_once(folder):
    (folder / "saves.py").write_text(
        "import pathlib, signal, time\n"
        "came = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: came.append(0))\n"
        "pathlib.Path('ready').touch()\n"
        "while not came:\n"
        "    time.sleep(0.05)\n"
        f"time.sleep({GRACE_SECONDS} + 1)\n"
        "raise SystemExit(len(came))\n"
    )
    with started("saves.py", folder / "ready") as parent:
        for _ in range(2):
            parent.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert parent.wait(timeout=30) == 1


@contextmanager
def started(script, ready):
    """`nanstop run`, once its script has made the file ``ready``."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "nanstop", "run", "--out", "incidents", script],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < limit
            time.sleep(0.05)
        yield parent
    finally:
        parent.kill()
        parent.wait()


def test_kill_switch(folder, monkeypatch):
    monkeypatch.setenv("NANSTOP", "off")
    (folder / "incidents").mkdir()
    (folder / "incidents" / "summary.json").write_text("{}")
    code, out, _, rows = run("loop.py", "bad")
    assert (code, out, rows) == (0, "finite False\n", {})


@pytest.mark.slow
def test_spawned_workers_open_nothing(folder):
    (folder / "workers.py").write_text(
        LOOP.replace("for step in range(4):", "for step in ():").replace("print(", "(")
        + """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        import sys
        assert sys.modules["nanstop.hosts.script.autowatch"]._open_session is not None
        try:
            nn.Embedding(2, 2)(torch.tensor([9]))
        except IndexError:
            return torch.zeros(1)


if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    print(len(list(loader)))
"""
    )
    code, out, err, rows = run("workers.py")
    assert (code, out, rows["incidents"]) == (0, "4\n", []), err


CHILD = """
import multiprocessing, sys
import torch, tqdm

def train(ending):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        if ending and step == 2:
            sys.exit(ending)

if __name__ == "__main__":
    kind, ending = sys.argv[1], int(sys.argv[2])
    child = multiprocessing.get_context(kind).Process(target=train, args=(ending,))
    child.start()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize(
    ("kind", "ending", "said"),
    [
        ("fork", 0, "4 steps watched, nothing found"),
        ("fork", 3, "3 steps watched, nothing found, ended early"),
        ("spawn", 0, "4 steps watched, nothing found"),
        ("spawn", 3, "3 steps watched, nothing found, ended early"),
        ("forkserver", 0, "4 steps watched, nothing found"),
    ],
)
def test_what_a_child_process_trains_is_told_at_its_end(folder, kind, ending, said):
    (folder / "child.py").write_text(CHILD)
    code, out, err, _ = run("child.py", kind, str(ending))
    assert (code, out, err) == (0, f"{ending}\n", f"nanstop: {said}\n")


def test_a_hidden_sitecustomize_still_runs(folder, monkeypatch):
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.hidden_ran = __name__\n")
    (folder / "asks.py").write_text(
        "import sys, sitecustomize\nprint(sys.hidden_ran, sitecustomize.__file__)\n"
        "print([p for p in sys.path if 'injection' in p])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    code, out, err, _ = run("asks.py")
    assert code == 0, err
    assert out.splitlines() == [f"sitecustomize {hidden / 'sitecustomize.py'}", "[]"]


def test_silent_where_nanstop_is_not_installed(folder):
    """A child whose environment has no nanstop: the import of torch (here:
    a module of that name) is as ever.
    """
    (folder / "torch.py").write_text("ready = True\n")
    (folder / "uses.py").write_text("import torch\nprint(torch.ready)\n")
    environment = {"PATH": os.environ["PATH"]} | watching(Policy(), folder, "1")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sitecustomize, runpy; runpy.run_path('uses.py')"],
        env=environment | {"PYTHONPATH": f"{INJECTION}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_asking_for_a_spec_is_no_import(folder):
    (folder / "asks.py").write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch') is not None\n"
        "assert 'nanstop' not in sys.modules\n"
        "import torch\n"
        "assert 'nanstop.hosts.script.autowatch' in sys.modules\n"
        "assert 'nanstop.records' not in sys.modules\n"
        "assert 'exec_module' not in vars(torch.__spec__.loader)\n"
    )
    code, _, err, _ = run("asks.py")
    assert code == 0, err


@pytest.mark.slow
def test_two_ranks_of_torchrun_skip_as_one(folder):
    (folder / "ranks.py").write_text(
        LOOP.replace(
            "torch.manual_seed(0)",
            "torch.manual_seed(0)\ntorch.distributed.init_process_group('gloo')\n"
            "rank = torch.distributed.get_rank()",
        )
        .replace("optimizer =", "net = nn.parallel.DistributedDataParallel(net)\noptimizer =")
        .replace('"bad" in sys.argv', "rank == 1")
        + "torch.distributed.destroy_process_group()\n"
    )
    code, out, err, rows = run("torchrun", "--nproc-per-node", "2", "ranks.py")
    assert (code, out) == (0, "finite True\n" * 2), err
    assert [row["rank"] for row in rows["incidents"]] == [1], "who has the bad rows tells of them"
    assert [row["action"] for row in rows["incidents"]] == ["skip"]
    assert err.count("1 of 4 updates skipped") == 1


@pytest.mark.slow
def test_accelerate_launch_with_accumulation(folder):
    (folder / "accelerated.py").write_text(
        LOOP.replace("optimizer.zero_grad()\n    loss", "loss")
        .replace(
            "for step",
            "from accelerate import Accelerator\n"
            "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
            "net, optimizer = accelerator.prepare(net, optimizer)\nfor step",
        )
        .replace("    loss = ", "    with accelerator.accumulate(net):\n        loss = ")
        .replace(
            "    loss.backward()\n    optimizer.step()",
            "        accelerator.backward(loss)\n"
            "        if accelerator.sync_gradients:\n"
            "            accelerator.clip_grad_norm_(net.parameters(), 1.0)\n"
            "        optimizer.step()\n        optimizer.zero_grad()",
        )
        .replace('step == 2 and "bad" in sys.argv', "step == 3")
    )
    code, out, err, rows = run("accelerate", "launch", "--cpu", "accelerated.py")
    assert (code, out) == (0, "finite True\n"), err
    (row,) = rows["incidents"]
    assert (row["step"], row["micro"]) == (1, 1)


@pytest.mark.slow
def test_a_trainer_of_transformers_is_watched_by_its_own_adapter(folder):
    (folder / "trains.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import tiny\n"
        "from transformers import Trainer, TrainingArguments\n"
        "class Own(Trainer):\n"
        "    def train(self, *args, **kwargs):\n"
        "        print('begins')\n"
        "        return super().train(*args, **kwargs)\n"
        "model = tiny.llama()\n"
        "if 'bad' in sys.argv:\n"
        "    model.lm_head.weight.data[3] = float('inf')\n"
        "args = TrainingArguments(**tiny.training_args('out', max_steps=3))\n"
        "trainer = Own(model=model, args=args, train_dataset=tiny.TokenRows(16))\n"
        "trainer.train()\n"
        "print('train' in vars(trainer))\n"
    )
    code, out, err, rows = run("trains.py")
    assert code == 0, err
    lines = out.splitlines()
    assert lines.count("begins") == 1
    assert lines[-1] == "False"
    assert (rows["incidents"], rows["steps"], rows["exit"]) == ([], 3, 0)
    _, _, _, rows = run("trains.py", "bad")
    assert rows["incidents"]


@pytest.mark.parametrize(
    "first",
    [
        "Trainer",
        pytest.param("PreTrainedModel", marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_whatever_is_imported_first_is_watched(folder, first):
    """transformers' trainer imports its models, and is in the table of modules by then."""
    (folder / "imports.py").write_text(
        f"from transformers import {first}\n"
        "from transformers import PreTrainedModel, Trainer\n"
        "for method in (Trainer.train, PreTrainedModel.from_pretrained.__func__):\n"
        "    print(method.__globals__['__name__'])\n"
    )
    code, out, err, _ = run("imports.py")
    assert (code, out.split()) == (0, ["nanstop.hosts.patch_table"] * 2)
    assert "not watching" not in err


def test_commands_are_resolved(folder):
    assert resolve_command(["loop.py", "--lr", "1"]) == [sys.executable, "loop.py", "--lr", "1"]
    assert resolve_command(["-m", "loop"]) == [sys.executable, "-m", "loop"]
    assert Path(resolve_command(["torchrun"])[0]).name == "torchrun"
    (folder / "pack").mkdir()
    (folder / "pack" / "__main__.py").touch()
    assert resolve_command(["pack"]) == [sys.executable, "pack"]


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        (["lop.py"], "no such script: lop.py", "did you mean `loop.py`?"),
        (["torchrn"], "no such program: torchrn", "did you mean `torchrun`?"),
        (["--lr", "1"], "unknown option: `--lr`", ""),
        (["-m"], "-m needs the name of a module", ""),
        ([], "nothing to run", ""),
        (["incidents"], "incidents is a folder without __main__.py", ""),
    ],
)
def test_commands_that_are_not_there(folder, command, message, hint):
    (folder / "incidents").mkdir()
    with pytest.raises(NanstopError) as raised:
        launch(command, policy=Policy(), out="incidents")
    assert raised.value.message == message
    assert raised.value.code == "NS001"
    assert hint in raised.value.hint
    assert not any((folder / "incidents").iterdir())


def test_the_policy_reaches_the_child(tmp_path):
    policy = Policy(on_failure="skip", allow=("clip", "lr"), budget_seconds=0.5)
    assert watched_policy(watching(policy, tmp_path, "1")) == policy
    assert watched_policy({}) == Policy()


def test_the_folder_of_the_injection_holds_one_file():
    assert [p.name for p in INJECTION.iterdir() if p.suffix == ".py"] == ["sitecustomize.py"]


def test_json_follows_the_scripts_output(folder):
    code, out, _, rows = run("loop.py", as_json=True)
    first, second = out.splitlines()
    assert (code, first) == (0, "finite True")
    assert json.loads(second) == rows
