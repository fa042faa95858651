"""Runs of the scoreboard: what is run, as which command, and what a tool said in it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scoreboard_healthy import all_runs
from scoring import Said
from truth import Truth

HERE = Path(__file__).parent
PROJECT = HERE.parent
PEERS_PYTHON = PROJECT / ".venv-peers" / "bin" / "python"
HEALTHY = HERE / "scoreboard_healthy.py"
TIMEOUT = 240.0
_TIMEOUTS = {"traincheck": 1800.0}
MOST_OUT, MOST_ERR = 2000, 6000
"""Characters kept of an output: its end."""
_SCRIPTS = {"plain": ("healthy",), "traincheck": ("case",)}
"""TrainCheck learns from the twin whenever it looks at the case, and then says of both what it has to say."""
_ALWAYS = ("torch", "transformers")
_HEALTHY_IMPORTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("loop", "checkpointing", "clipping"), ()),
    "Trainer": ("transformers.trainer",),
    "LoRA": ("peft",),
}
_LOSS = re.compile(r"^final_loss=(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One script under one tool. ``name``: of the file that its record becomes. ``allow``: remedies the user allows."""

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
        """What the script is going to import; a script that says nothing of TRL must not find it imported."""
        if self.script == HEALTHY:
            more = _HEALTHY_IMPORTS.get(self.arguments[-1], ("transformers.trainer", "trl", "peft"))
            return (*_ALWAYS, *more)
        text = self.script.read_text() + (self.script.parent / "case.py").read_text()
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
    runs: Sequence[Run], scratch: Path, at_once: int, done: Callable[[Run, dict[str, Any]], None]
) -> None:
    """Run everything, forked from one warm process for each set of imports; ``done`` gets each record as it is made."""
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
        server = subprocess.Popen(
            [str(python), str(HERE / "scoreboard_warm.py"), str(plan)],
            env=environment() | (_injection() if watched else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        for line in server.stdout:
            name = json.loads(line)["name"]
            done(named[name], record(named[name], places[name]))
        if server.wait():
            raise SystemExit(
                f"the warm process for {', '.join(imports)} ended with {server.returncode}"
            )


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
    return record(run, folder)


def environment() -> dict[str, str]:
    """Return the variables that every run gets."""
    path = os.pathsep.join((str(HERE / "cases"), str(HERE)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NANSTOP")}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _injection() -> dict[str, str]:
    """Return what makes a process follow torch as those below ``nanstop run`` do."""
    from nanstop.run.opening import INJECTION

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


def record(run: Run, folder: Path) -> dict[str, Any]:
    """Return what is kept of a run that is over: what was said, the command and the raw output."""
    ended = json.loads((folder / "ended.json").read_text())
    out = (folder / "stdout").read_text(errors="replace")
    err = (folder / "stderr").read_text(errors="replace")
    said = _READERS.get(run.tool, _said_by_peer)(folder, out, err)
    losses = _LOSS.findall(out)
    said |= {"final_loss": float(losses[-1]) if losses else math.nan, "seconds": ended["seconds"]}
    if ended["code"] is None:
        said["failed"] = f"ended after {TIMEOUT:.0f} s"
    return {
        "said": asdict(Said(**said)),
        "command": " ".join(_portable(word) for word in ["python", *run.command]),
        "code": ended["code"],
        "stdout": _portable(out)[-MOST_OUT:],
        "stderr": _portable(err)[-MOST_ERR:],
    }


def twin_record(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the twin that a tool looked at in the run of its case, if it did."""
    try:
        alarms = json.loads(found["stdout"].splitlines()[-1])["twin_alarms"]
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        return None
    said = Said(alarms=alarms)
    return {
        "said": asdict(said),
        "command": found["command"],
        "code": 0,
        "stdout": "",
        "stderr": "",
    }


def said_in(kept: Mapping[str, Any]) -> Said:
    """Return what was said, from a record that was read back."""
    said = dict(kept["said"])
    for name in ("ruled_out", "ops", "modules"):
        said[name] = tuple(said[name])
    return Said(**(said | {"answers": tuple((code, sure) for code, sure in said["answers"])}))


def _said_by_nobody(folder: Path, out: str, err: str) -> dict[str, Any]:
    return {}


def _said_by_nanstop(folder: Path, out: str, err: str) -> dict[str, Any]:
    """Read ``summary.json``: incidents are alarms, and so are findings about a run that has not failed."""
    try:
        summary = json.loads((folder / "found" / "summary.json").read_text())
    except FileNotFoundError:
        return {"failed": f"no summary.json was written: {err[-300:]}"}
    rows, findings = summary["incidents"], summary["findings"]
    reports = [_diagnoses(folder / "found" / row["folder"], row) for row in rows]
    answers = [(d["code"], d["confidence"]) for found in reports for d in found]
    answers += [(one["code"], one["confidence"]) for one in findings]
    said: dict[str, Any] = {
        "alarms": len(rows) + len(findings),
        "incidents": len(rows),
        "answers": tuple(dict.fromkeys(answers)),
    }
    if rows:
        first = rows[0]
        lines = reports[0][0].get("lines", ()) if reports[0] else ()
        said |= {name: first[name] for name in ("step", "micro", "phase")}
        said |= {
            "ops": (first["op"],) if first["op"] else (),
            "modules": (first["module"] or "",),
            "proven": first["verdict"] == "proven",
            "ruled_out": tuple(line for line in lines if line.startswith("ruled out")),
        }
    elif findings:
        said["modules"] = (findings[0]["where"],)
    return said


def _diagnoses(folder: Path, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        found = json.loads((folder / "report.json").read_text())["diagnoses"]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        found = []
    return found or [{"code": row["code"], "confidence": row["confidence"] or "possible"}]


def _said_by_peer(folder: Path, out: str, err: str) -> dict[str, Any]:
    """Read the line that ``peers/under.py`` prints last."""
    try:
        found = json.loads((folder / "peer.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {"failed": err[-300:] or "nothing was printed"}
    if found["failed"]:
        return {"failed": found["failed"]}
    alarm = found["alarm"] or {}
    said = {name: alarm.get(name) for name in ("step", "micro", "phase")}
    listed = {name: tuple(alarm.get(name) or ()) for name in ("ops", "modules")}
    return {"alarms": found["alarms"], **said, **listed}


_READERS: Mapping[str, Callable[[Path, str, str], dict[str, Any]]] = {
    "plain": _said_by_nobody,
    "nanstop": _said_by_nanstop,
}


def _portable(text: str) -> str:
    """Return text without the folders of this machine."""
    return (
        text.replace(str(PROJECT / ".venv-peers"), "$VENV")
        .replace(sys.prefix, "$VENV")
        .replace(str(PROJECT), ".")
    )
