"""Bisects on a real local Ray: the same answer, limits and resumption, and nothing left where
the driver is killed.
"""

import json
import os
import subprocess
import sys
import time

import pytest

from processes import commands_with

pytest.importorskip("ray", reason="Ray is not installed: pip install 'nanstop[ray]'")

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys, time
config = json.load(open(sys.argv[1]))
with open("runs.log", "a") as log:
    log.write(json.dumps(config) + "\\n")
names = [name for name in os.environ if name.startswith("RAY")]
if names: sys.exit(f"started under {names}")
time.sleep(config.get("seconds", 0))
"""
FPE = "if config['a'] == 1 and config['b'] == 1: signal.raise_signal(signal.SIGFPE)\n"
GOOD = {f"k{n}": 0 for n in range(6)} | {"a": 0, "b": 0}
BAD = dict.fromkeys(GOOD, 1)


@pytest.fixture
def bisect_on_ray(tmp_path):
    """Run the command in a folder of its own: (exit code, result or None, standard error)."""

    def begin(ending, bad=BAD, good=GOOD, *options, executor="ray"):
        (tmp_path / "train.py").write_text(SCRIPT + ending)
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        (tmp_path / "good.json").write_text(json.dumps(good))
        command = [sys.executable, "-m", "nanstop", "bisect", "bad.json", "good.json"]
        options = ["--script", "train.py", "--executor", executor, "--json", *options]
        return subprocess.Popen(
            [*command, *options],
            cwd=tmp_path,
            # What Ray has set in this process when it was imported is no part of a user's
            # environment.
            env={k: v for k, v in os.environ.items() if k == "RAY_ADDRESS" or "RAY_" not in k},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(*arguments, **options):
        process = begin(*arguments, **options)
        out, err = process.communicate(timeout=200)
        return process.returncode, json.loads(out) if out else None, err

    run.begin = begin
    return run


def runs(folder):
    return len((folder / "runs.log").read_text().splitlines())


def test_a_cluster_finds_what_this_machine_finds_and_its_trials_are_kept(bisect_on_ray, tmp_path):
    code, found, err = bisect_on_ray(FPE, BAD, GOOD, "-j", "2")
    assert code == 0, err
    assert (found["minimal"], found["failure"]["name"]) == (["a", "b"], "SIGFPE")
    assert found["not_forked"] == "Ray starts each trial by itself"
    assert {row["end"] for row in found["trials"]} == {"clean", "SIGFPE"}
    assert runs(tmp_path) == len(found["trials"])
    _, again, _ = bisect_on_ray(FPE, executor="spawn")
    assert again["minimal"] == ["a", "b"]
    assert runs(tmp_path) <= len(found["trials"]) + sum(not row["known"] for row in again["trials"])


def test_limits_hold_on_a_cluster(bisect_on_ray):
    ending = "if config['a']: time.sleep(600)\nif config['b']: x = bytearray(600 * 2**20)\n"
    bad, good = {"a": 1, "b": 0}, {"a": 0, "b": 0}
    _, found, err = bisect_on_ray(ending, bad, good, "--timeout", "2")
    assert (found["minimal"], found["failure"]["kind"]) == (["a"], "timeout"), err
    _, found, err = bisect_on_ray(ending, {"b": 1, "a": 0}, good, "--memory", "300")
    assert (found["minimal"], found["failure"]["kind"]) == (["b"], "oom"), err


def test_a_cluster_that_does_not_answer_is_said_at_once(bisect_on_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, found, err = bisect_on_ray(FPE)
    assert (code, found) == (2, None)
    assert err.startswith("error[NS001]: no Ray cluster at 127.0.0.1:1: Connection refused")


def test_no_trial_is_left_where_the_driver_is_killed(bisect_on_ray, tmp_path):
    seconds = {"seconds": 600}
    process = bisect_on_ray.begin(FPE, BAD | seconds, GOOD | seconds)
    deadline = time.monotonic() + 100
    places = tmp_path / ".nanstop", os.environ["NANSTOP_DIR"]
    while not any(commands_with(place, "train.py") for place in places):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.1)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while commands_with(os.environ["NANSTOP_DIR"], "train.py") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not commands_with(os.environ["NANSTOP_DIR"], "train.py")
