"""Runs of the scoreboard: what is run, as which command, and what a tool said in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoreboard_healthy import all_runs
from scoreboard_said import record
from truth import Truth

HERE = Path(__file__).parent
PROJECT = HERE.parent
PEERS_PYTHON = PROJECT / ".venv-peers" / "bin" / "python"
HEALTHY = HERE / "scoreboard_healthy.py"
TIMEOUT = 240.0
_TIMEOUTS = {"traincheck": 3600.0}
_SCRIPTS = {"plain": ("healthy",), "traincheck": ("case",)}
"""TrainCheck learns from the twin whenever it looks at the case, and then says of both what it
has to say.
"""
_ALWAYS = ("torch", "transformers")
_HEALTHY_IMPORTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("loop", "checkpointing", "clipping"), ()),
    "Trainer": ("transformers.trainer",),
    "LoRA": ("peft",),
}


@dataclass(frozen=True)
class Run:
    """One script under one tool. ``name``: of the file that its record becomes.
    ``allow``: remedies the user allows.
    """

    tool: str
    name: str
    script: Path
    arguments: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The words after ``python``."""
        script = [str(self.script), *self.arguments]
        if self.tool == "plain":
            return script
        if self.tool == "nanstop":
            allowed = [word for name in self.allow for word in ("--allow", name)]
            return ["-m", "nanstop", "run", "--out", "found", *allowed, *script]
        return [str(HERE / "peers" / "under.py"), self.tool, *script]

    @property
    def imports(self) -> tuple[str, ...]:
        """What the script is going to import;
        a script that says nothing of TRL must not find it imported.
        """
        if self.script == HEALTHY:
            more = _HEALTHY_IMPORTS.get(self.arguments[-1], ("transformers.trainer", "trl", "peft"))
            return (*_ALWAYS, *more)
        twin = self.script.with_name("case.py")
        text = self.script.read_text() + (twin.read_text() if twin.is_file() else "")
        found = set(re.findall(r"^\s*(?:from|import) (trl|peft)\b", text, re.MULTILINE))
        found |= {"transformers.trainer"} if "Trainer" in text else set()
        return (*_ALWAYS, *sorted(found))


def runs_of(tool: str, truths: Iterable[Truth]) -> list[Run]:
    """Return a run of every case and of every twin; of the twins alone where no tool looks."""
    return [
        Run(tool, f"{truth.name}.{script}", truth.folder / f"{script}.py", allow=truth.allow)
        for truth in truths
        for script in _SCRIPTS.get(tool, ("case", "healthy"))
    ]


def healthy_runs(tool: str) -> list[Run]:
    """Return the further healthy runs, in which every alarm is a false one."""
    return [Run(tool, f"healthy.{'.'.join(one)}", HEALTHY, one) for one in all_runs()]


def python_for(tool: str) -> Path:
    """Return the interpreter that has the tool; the peers have one of their own if it is there."""
    ours = tool in ("plain", "nanstop") or not PEERS_PYTHON.exists()
    return Path(sys.executable) if ours else PEERS_PYTHON


def run_all(
    runs: Sequence[Run],
    scratch: Path,
    at_once: int,
    done: Callable[[Run, dict[str, Any]], None],
    read: Callable[[Run, Path], dict[str, Any]] | None = None,
) -> None:
    """Run everything, forked from one warm process for each set of imports; ``done`` gets what
    ``read`` makes of the folder of each run as it ends, by default the record that is kept.
    """
    groups: dict[tuple[Path, bool, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        key = (python_for(run.tool), run.tool == "nanstop", run.imports)
        groups.setdefault(key, []).append(run)
    for (python, watched, imports), group in groups.items():
        named = {f"{run.tool}/{run.name}": run for run in group}
        jobs = [_job(name, run, scratch / str(i)) for i, (name, run) in enumerate(named.items())]
        places = {job["name"]: Path(job["folder"]) for job in jobs}
        plan = scratch / "plan.json"
        plan.write_text(json.dumps({"imports": imports, "jobs": jobs, "at_once": at_once}))
        with subprocess.Popen(
            [str(python), str(HERE / "scoreboard_warm.py"), str(plan)],
            env=environment() | (_injection() if watched else {}),
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            for line in server.stdout:
                name = json.loads(line)["name"]
                done(named[name], (read or record_of)(named[name], places[name]))
        if server.returncode:
            raise SystemExit(f"the warm process for {imports} ended with {server.returncode}")


def run_cold(run: Run, folder: Path) -> dict[str, Any]:
    """Return the record of one run that is a process of its own from the start."""
    folder.mkdir(parents=True)
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        try:
            code: int | None = subprocess.run(
                [str(python_for(run.tool)), *run.command],
                cwd=folder,
                env=environment(),
                stdout=out,
                stderr=err,
                timeout=_TIMEOUTS.get(run.tool, TIMEOUT),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    (folder / "ended.json").write_text(json.dumps({"code": code, "seconds": 0.0}))
    return record_of(run, folder)


def environment() -> dict[str, str]:
    """Return the variables that every run gets."""
    path = os.pathsep.join((str(HERE / "cases"), str(HERE)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NANSTOP")}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _injection() -> dict[str, str]:
    """Return what makes a process follow torch as those below ``nanstop run`` do."""

    from nanstop.process.inject.variables import INJECTION

    return {
        "NANSTOP_RUN": "warm",
        "PYTHONPATH": os.pathsep.join((str(INJECTION), environment()["PYTHONPATH"])),
    }


def _job(name: str, run: Run, folder: Path) -> dict[str, Any]:
    folder = folder.with_name(f"{run.tool}-{folder.name}-{run.name}".replace(" ", "_"))
    folder.mkdir(parents=True)
    return {
        "name": name,
        "command": run.command,
        "folder": str(folder),
        "environment": environment(),
        "timeout": _TIMEOUTS.get(run.tool, TIMEOUT),
    }


def record_of(run: Run, folder: Path) -> dict[str, Any]:
    """Return the record that is kept of a run that is over."""
    return record(run.tool, run.command, folder)
