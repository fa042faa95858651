"""Each way in which people start several processes, with nanstop before or behind the launcher."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hosts.sharded.two_ranks import incidents
from versions import needs

PROGRAMS = Path(__file__).with_name("rank_programs.py")
SECONDS = 240
NANSTOP = ["-m", "nanstop", "run", "--allow", "drop_sample", "--out", "out"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--main_process_port", "0"),
]
"""accelerate has no other way to start two processes on a machine without MPI; the script says
that they train on the CPU."""
PYTHON = sys.executable


def started(folder, *command, codes=(0,)):
    """Run a command in a folder of its own; return what its ranks have put down, and stderr."""
    folder.mkdir()
    known = {k: v for k, v in os.environ.items() if not k.startswith("NANSTOP_")}
    paths = os.pathsep.join(filter(None, (str(Path(PYTHON).parent), os.environ.get("PATH", ""))))
    done = subprocess.run(
        command,
        cwd=folder,
        env=known | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": paths},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode in codes, done.stderr
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("result-*.json"))]
    return results, done.stderr


def assert_one_answer(folder, command, alone):
    results, told = started(folder / "ranks", *command)
    assert len(results) == 2
    assert len({one["digest"] for one in results}) == 1
    assert math.isclose(results[0]["loss"], alone["loss"], abs_tol=1e-5)
    (row,), (report,) = incidents(folder / "ranks")
    assert (row["code"], row["rank"], row["step"]) == ("NS501", 1, 3)
    assert row["action"] == "quarantine"
    assert report["incident"]["born_on"] == [1]
    assert told.count("error[") == 1
    return row


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    command = (PYTHON, *NANSTOP, str(PROGRAMS), "loop", "data")
    (result,), _ = started(folder / "run", *command)
    return result


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*TORCHRUN, *NANSTOP, str(PROGRAMS)], id="torchrun nanstop"),
        pytest.param(
            [*NANSTOP, PYTHON, *TORCHRUN, str(PROGRAMS)],
            id="nanstop torchrun",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize(
    "program",
    [
        "loop",
        pytest.param(
            "sharded", marks=[pytest.mark.slow, needs("torch", "2.8", "fully_shard on a CPU")]
        ),
    ],
)
def test_torchrun(tmp_path, alone, command, program):
    row = assert_one_answer(tmp_path, [PYTHON, *command, program, "data"], alone)
    assert row["module"] == "first"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*ACCELERATE, *NANSTOP, str(PROGRAMS)], id="accelerate nanstop"),
        pytest.param([*NANSTOP, PYTHON, *ACCELERATE, str(PROGRAMS)], id="nanstop accelerate"),
    ],
)
def test_accelerate(tmp_path, alone, command):
    assert_one_answer(tmp_path, [PYTHON, *command, "accelerated", "data"], alone)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_the_launcher_of_deepspeed(tmp_path, alone):
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"]
    command = [PYTHON, *NANSTOP, PYTHON, *launcher, str(PROGRAMS), "engine", "data"]
    row = assert_one_answer(tmp_path, command, alone)
    assert row["module"] == "first"
