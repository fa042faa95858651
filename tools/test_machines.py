"""Runs the tests of the last commit as other machines would:
folders of any name, kernels of other CPUs, other seeds.

    .venv/bin/python tools/test_machines.py [NAME ...] [-- PYTEST_ARGUMENT ...]

Each machine is a clone with an environment of its own that has the packages of this one. All
machines and the tests of `make test` by default. The exit code is 1 where a machine has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = ("-q", "-W", "error", "-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``clone``: where the code lies; ``scripts``: where tests write theirs;
    ``kernels``: of torch, "" for the best.
    """

    clone: str
    scripts: str
    kernels: str
    threads: int
    seed: int


MACHINES = {
    "oldest": Machine(clone="nanstop", scripts="accelerate", kernels="default", threads=1, seed=1),
    "threads": Machine(clone="accelerate", scripts="nanstop", kernels="default", threads=2, seed=2),
    "letters": Machine(clone="a b/南停", scripts="c d/表", kernels="avx2", threads=1, seed=3),
    "libraries": Machine(
        clone="transformers/utils", scripts="site-packages/torch", kernels="avx2", threads=2, seed=4
    ),
    "nested": Machine(
        clone="accelerate/a b/南停/nanstop", scripts="trl/nanstop", kernels="", threads=1, seed=5
    ),
}


def make(machine: Machine, place: Path) -> Path:
    """Return the Python of a clone in ``place`` that finds the packages of the present one."""
    clone = place / machine.clone
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv.create(clone / ".venv", symlinks=True)
    here, there = Path(sys.executable).parent, clone / ".venv" / "bin"
    (site,) = (clone / ".venv" / "lib").glob("python*/site-packages")
    packages = [one for one in sys.path[1:] if Path(one).is_dir() and Path(one) != ROOT / "src"]
    lines = "\n".join((str(clone / "src"), *packages))
    (site / "shared.pth").write_text(lines, encoding="utf-8")
    for program in here.iterdir():
        target = there / program.name
        if target.exists() or not program.is_file():
            continue
        text = program.read_bytes()
        if text.startswith(b"#!") and b"python" in text.partition(b"\n")[0]:
            # A first line cannot name a path with a space:
            # the shell starts Python on the same file.
            start = f"#!/bin/sh\n'''exec' \"{there / 'python'}\" \"$0\" \"$@\"\n' '''\n".encode()
            target.write_bytes(start + text.partition(b"\n")[2])
            target.chmod(0o755)
        else:
            target.symlink_to(program)
    return there / "python"


def test(machine: Machine, place: Path, arguments: Sequence[str]) -> int:
    """Run the tests there and return pytest's exit code."""
    python = make(machine, place)
    scripts = place / "tests of" / machine.scripts
    scripts.mkdir(parents=True)
    variables = {**os.environ, "OMP_NUM_THREADS": str(machine.threads)}
    variables |= {"ATEN_CPU_CAPABILITY": machine.kernels} if machine.kernels else {}
    own = (f"--basetemp={scripts / 't'}", f"--hypothesis-seed={machine.seed}")
    command = [str(python), "-m", "pytest", *PYTEST, *own, *arguments]
    return subprocess.run(command, cwd=place / machine.clone, env=variables, check=False).returncode


def main() -> int:
    words, codes = sys.argv[1:], {}
    end = words.index("--") if "--" in words else len(words)
    for name in words[:end] or MACHINES:
        sys.stderr.write(f"== {name}: {MACHINES[name]}\n")
        with tempfile.TemporaryDirectory(prefix="nanstop-machine-") as place:
            codes[name] = test(MACHINES[name], Path(place), words[end + 1 :])
    for name, code in codes.items():
        ended = "passed" if code == 0 else f"FAILED (pytest ended with {code})"
        sys.stderr.write(f"{name:10} {ended}\n")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
