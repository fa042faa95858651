"""What a user's machine is like makes no difference:
what folders are called, what the system offers.
"""

import os
import subprocess
import sys

import pytest

from e2e.scripts import run

LOOP = """
import signal
import sys
import time

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 2)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)


def distance(scores, wanted):
    return (scores - wanted).square().mean()


for step in range(9):
    photos, prices = torch.randn(4, 6), torch.randn(4, 2)
    if "bad" in sys.argv and step == 3:
        prices[2, 1] = float("inf")
    if "late" in sys.argv and step == 7:
        time.sleep(600)
    if "dead" in sys.argv and step == 3:
        net.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGFPE))
    optimizer.zero_grad()
    distance(net(photos), prices).backward()
    optimizer.step()
print("trained")
"""
LINE = LOOP.splitlines().index("    return (scores - wanted).square().mean()") + 1


@pytest.fixture
def folder(tmp_path):
    """A folder that is called as libraries are, and as few folders are."""
    place = tmp_path / "site-packages/torch/accelerate/a b/南停/nanstop/transformers/utils"
    place.mkdir(parents=True)
    (place / "train.py").write_text(LOOP)
    return place


@pytest.mark.slow
def test_a_script_has_its_lines_and_names_in_a_folder_of_any_name(folder):
    ended = run(folder, "train.py", "bad")
    assert ended.out == b"trained\n", ended.err
    (row,) = ended.rows
    assert (row["code"], row["source"]) == ("NS501", f"{folder / 'train.py'}:{LINE}")
    assert "`batch[prices]`" in ended.err


@pytest.mark.slow
def test_a_process_that_died_there_has_left_its_last_line(folder):
    ended = run(folder, "train.py", "dead", options=("--record",))
    (row,) = ended.rows
    assert row["code"] == "NS601"
    file, _, line = row["source"].rpartition(":")
    assert file == str(folder / "train.py")
    assert LOOP.splitlines()[int(line) - 1].strip() == "distance(net(photos), prices).backward()"


ELSEWHERE = """
import builtins
import io
import multiprocessing.util  # takes what it needs of this system before that is hidden
import os
import signal
import subprocess
import sys

for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "wait3", "wait4", "killpg", "setsid", "getsid", "getpgrp",
             "getpgid", "setpgid", "tcgetpgrp", "sysconf", "sched_getaffinity", "posix_spawn",
             "mkfifo"):
    vars(os).pop(name, None)
EVERYWHERE = ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV")
for name in [one for one in vars(signal) if one.startswith("SIG") and one[3:4].isalpha()]:
    if name not in EVERYWHERE:
        del vars(signal)[name]


def hiding(function):
    def hidden(path, *args, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **options)
    return hidden


builtins.open = io.open = hiding(io.open)
for name in ("listdir", "scandir", "stat", "lstat", "readlink", "open"):
    setattr(os, name, hiding(getattr(os, name)))
"""
"""A ``sitecustomize`` that leaves of Linux what Windows and macOS have, too;
torch itself needs the rest to start.
"""


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with the script, and the variables under which every process finds less than
    Linux.
    """
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "sitecustomize.py").write_text(ELSEWHERE)
    (tmp_path / "train.py").write_text(LOOP)
    return tmp_path, {"PYTHONPATH": str(tmp_path / "system")}


def nanstop(place, *words):
    """What a command of nanstop says there, and its exit code."""
    folder, variables = place
    done = subprocess.run(
        [sys.executable, "-m", "nanstop", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NANSTOP_DIR": "found"} | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "bug in nanstop" not in done.stderr
    assert "not watched" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_failure_is_found_and_kept_from_the_weights_elsewhere(elsewhere):
    folder, variables = elsewhere
    ended = run(folder, "train.py", "bad", **variables)
    (row,) = ended.rows
    assert (row["code"], row["action"], row["source"]) == (
        "NS501",
        "skip",
        f"{folder / 'train.py'}:{LINE}",
    )
    assert (ended.out, ended.code) == (b"trained\n", 0)
    code, out, _ = nanstop(elsewhere, "report", "incidents")
    assert code == 0
    assert "NS501" in out


def test_bisect_says_what_it_needs(elsewhere):
    for name in ("bad", "good"):
        (elsewhere[0] / f"{name}.yaml").write_text(f"name: {name}")
    code, _, said = nanstop(elsewhere, "bisect", "bad.yaml", "good.yaml", "--script", "train.py")
    assert code == 2
    assert said == (
        "error[NS001]: a trial cannot be ended with all that it started: this system has no process"
        " groups\nhelp: bisect needs Linux, macOS or, on Windows, WSL\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["check", "train.py"], 0, "loop: nothing found (facts and a probe of the first window"),
        (["plan", "train.py"], 0, "loss scale from"),
        (["doctor", "train.py"], 1, "5 of 5 injected failures reach the weights"),
        (["lr-range", "train.py"], 1, "steps, one rate each"),
        (["run", "--hang", "2", "train.py", "late"], 143, "error[NS605]: run stood still"),
    ],
)
def test_every_command_works_elsewhere(elsewhere, command, code, said):
    found, out, err = nanstop(elsewhere, *command)
    assert said in out + err
    assert found == code


TRAINER = f"""
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
))
ids = torch.arange(3, 11)
settings = TrainingArguments(output_dir="out", max_steps=4, logging_steps=1, report_to=[],
                             save_steps=2, disable_tqdm=True, use_cpu=True)

class Divided(Trainer):
    def compute_loss(self, model, inputs, **options):
        loss = super().compute_loss(model, inputs, **options)
        return loss / (self.state.global_step != 2)

rows = [{{"input_ids": ids, "labels": ids}}] * 32
trainer = Divided(model=model, args=settings, train_dataset=rows)
{ELSEWHERE}
trainer.train()
print("trained", all(bool(p.isfinite().all()) for p in model.parameters()))
"""
"""What is hidden is hidden after the imports: on Linux, transformers' own do not do without."""


@pytest.mark.slow
def test_a_trainer_is_watched_elsewhere(tmp_path):
    (tmp_path / "train.py").write_text(TRAINER)
    ended = run(tmp_path, "train.py")
    assert ended.out.endswith(b"trained True\n"), ended.err
    (row,) = ended.rows
    assert (row["step"], row["source"].rpartition(":")[0]) == (2, str(tmp_path / "train.py"))
    assert "not watched" not in ended.err


def test_a_console_without_every_letter_ends_nothing(tmp_path):
    place = tmp_path / "南停"
    place.mkdir()
    said = nanstop((place, {"PYTHONIOENCODING": "cp1252"}), "explain", "NS201", "--lang", "zh")
    assert said[0] == 0
    (place / "x.py").write_text("")
    code, out, _ = nanstop(
        (place, {"PYTHONIOENCODING": "cp1252", "NANSTOP_DIR": str(place)}), "run", "--json", "x.py"
    )
    assert (code, out[:1]) == (0, "{")
