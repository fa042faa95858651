"""Runs of foreign scripts: which there are, as which commands, and what each left."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from nanstop.commands.run.launch import NOTHING_WATCHED

HERE = Path(__file__).parent
FOLDER = HERE / "foreign"
POLICIES = ("observe", "skip", "stop", "repair")
STOPPED = 3
"""The exit code of `nanstop run` where nanstop stopped the training."""
TIMEOUT = 240.0
_RECORD = "record"
_IMPORTS = {
    "accelerate": ("torch", "transformers", "accelerate"),
    "lightning": ("torch", "lightning"),
}
_OWN = tuple(
    f"nanstop.{name}"
    for name in (
        "commands.run.launch",
        "cli.run",
        "hosts.script.raw_loops",
        "session.session",
        "session.failing.investigation",
    )
)
"""What a watched run imports of nanstop sooner or later;
the warm process has it already, which saves half of its time.
"""
_UNWATCHED = re.compile(
    f"^(?:{re.escape(NOTHING_WATCHED)}"
    r"|nanstop: this loop is not watched any more \(several threads train at once\)\n)",
    re.M,
)
"""What is said, and true, of a loop that updates its weights by hand, and of threads that share
a model: the page counts them apart.
"""
_END = re.compile(
    r"^nanstop: (?:.*; )?\d+ (?:steps?|updates of several optimizers) watched.*\n", re.M
)
"""The last line of a watched run."""
_NUMBERS = re.compile(r"0x[0-9a-f]+|Thread-\d+")


@dataclass(frozen=True)
class Script:
    """A script and what its own options offer."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.choices.get("--dtype", ("fp32",))

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(fault for fault in self.choices.get("--fault", ()) if fault != "none")

    @property
    def imports(self) -> tuple[str, ...]:
        """What a process that is forked for it has imported."""
        text = self.path.read_text()
        packages = (p for p in _IMPORTS if re.search(rf"^ *(from|import) {p}\b", text, re.M))
        return _IMPORTS.get(next(packages, ""), ("torch",))

    @property
    def is_installed(self) -> bool:
        from importlib.util import find_spec

        return all(find_spec(name) is not None for name in self.imports)

    @cached_property
    def choices(self) -> dict[str, tuple[str, ...]]:
        return dict(_choices(ast.parse(self.path.read_text())))


def _choices(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the options of an ``argparse`` parser that have choices."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = {k.arg: k.value for k in node.keywords}
            if "choices" in given:
                yield ast.literal_eval(node.args[0]), ast.literal_eval(given["choices"])


@dataclass(frozen=True)
class Run:
    """A script under a policy; ``policy`` "plain": without nanstop.
    ``cold``: a process of its own from the start.
    """

    script: Script
    dtype: str
    fault: str
    policy: str
    cold: bool = False

    @property
    def name(self) -> str:
        parts = [self.script.name, self.dtype, self.fault, self.policy]
        return ".".join([*parts, "cold"] if self.cold else parts)

    @property
    def command(self) -> list[str]:
        """The words after ``python``."""
        words = [str(self.script.path)]
        words += ["--fault", self.fault] if self.script.faults else []
        words += ["--dtype", self.dtype] if "--dtype" in self.script.choices else []
        if self.policy == "plain":
            return words
        return ["-m", "nanstop", "run", "--on-failure", self.policy, "--out", "found", *words]


@dataclass(frozen=True)
class Left:
    """What a run left. ``steps``: its lines of record;
    ``end``: the last of them, None if it did not get there.

    ``raised``: the last line of each traceback. ``said``: codes of incidents and findings. ``own``:
    what nanstop says of itself. ``unwatched``: whether it says that it saw nothing to watch.
    ``code``: None where it did not end in time.
    """

    code: int | None
    steps: tuple[dict[str, Any], ...]
    end: dict[str, Any] | None
    raised: tuple[str, ...]
    said: tuple[str, ...]
    own: tuple[str, ...]
    stdout: str
    stderr: str
    unwatched: bool
    seconds: float


def scripts(names: Sequence[str] = (), folder: Path = FOLDER) -> list[Script]:
    """Return the scripts of those names in a folder, by default all."""
    paths = (p for p in sorted(folder.glob("*.py")) if p.stem != _RECORD)
    return [Script(p) for p in paths if not names or p.stem in names]


def run_all(
    runs: Sequence[Run], scratch: Path, at_once: int, done: Callable[[Run, Left], None]
) -> None:
    """Run everything, forked from one warm process for each set of imports;
    ``done`` gets what each run left.

    Plain runs come first, cold ones last.
    """
    groups: dict[tuple[bool, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        if not run.cold:
            groups.setdefault((run.policy != "plain", run.script.imports), []).append(run)
    for (watched, imports), group in sorted(groups.items()):
        named = {run.name: run for run in group}
        jobs = [_job(run, scratch / run.name) for run in group]
        plan = scratch / "plan.json"
        more = imports + _OWN if watched else imports
        plan.write_text(json.dumps({"imports": more, "jobs": jobs, "at_once": at_once}))
        with subprocess.Popen(
            [sys.executable, str(HERE / "scoreboard_warm.py"), str(plan)],
            env=_environment() | (_injection() if watched else {}),
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            for line in server.stdout:
                run = named[json.loads(line)["name"]]
                done(run, _left_in(scratch / run.name))
        if server.returncode:
            raise SystemExit(f"the warm process for {imports} ended with {server.returncode}")
    cold = [run for run in runs if run.cold]
    with ThreadPoolExecutor(at_once) as pool:
        for run, left in zip(cold, pool.map(partial(_run_cold, scratch), cold), strict=True):
            done(run, left)


def _run_cold(scratch: Path, run: Run) -> Left:
    """Return what a run left that is a process of its own, as a user starts it."""
    folder = scratch / run.name
    folder.mkdir(parents=True)
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        try:
            code: int | None = subprocess.run(
                [sys.executable, *run.command],
                cwd=folder,
                env=_environment(),
                stdout=out,
                stderr=err,
                timeout=TIMEOUT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    (folder / "ended.json").write_text(json.dumps({"code": code, "seconds": 0.0}))
    return _left_in(folder)


def _left_in(folder: Path) -> Left:
    """Return what a run that is over left in its folder."""
    ended = json.loads((folder / "ended.json").read_text())
    texts = [(folder / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    out, err = (_NUMBERS.sub("", text.replace(str(folder), ".")) for text in texts)
    err, unwatched = _UNWATCHED.subn("", err)
    record = folder / "left.jsonl"
    lines = (
        [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    )
    at_end = bool(lines) and "end" in lines[-1]
    raised = tuple(re.findall(r"^Traceback .*\n(?:[ \n].*\n)*(\S.*)$", err, re.M))
    return Left(
        code=_as_shown(ended["code"], raised),
        steps=tuple(lines[:-1] if at_end else lines),
        end=lines[-1] if at_end else None,
        raised=raised,
        said=tuple(_codes(folder / "found" / "summary.json")),
        own=tuple(
            re.findall(r"^nanstop: .*(?:not (?:watched|investigated|read)|bug).*$", err, re.M)
        ),
        stdout=out,
        stderr=_END.sub("", err),
        unwatched=bool(unwatched),
        seconds=ended["seconds"],
    )


def _as_shown(code: int | None, raised: Sequence[str]) -> int | None:
    """Return the exit code that `nanstop run` shows: a fork has no such parent, which turns a
    ``TrainingStopped`` that nothing caught into its own; one that ended a thread leaves 0.
    """
    stopped = code in (0, 1) and bool(raised) and "TrainingStopped" in raised[-1]
    return STOPPED if stopped else code


def _codes(path: Path) -> Iterator[str]:
    if path.is_file():
        summary = json.loads(path.read_text())
        yield from (row["code"] for row in summary["incidents"])
        yield from (f"{row['code']} (finding)" for row in summary["findings"])


def _job(run: Run, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    return {
        "name": run.name,
        "command": run.command,
        "folder": str(folder),
        "environment": _environment(),
        "timeout": TIMEOUT,
    }


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NANSTOP")}
    paths = os.pathsep.join(filter(None, (str(FOLDER), kept.get("PYTHONPATH"))))  # has record.py
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}


def _injection() -> dict[str, str]:
    """Return what makes a process follow torch as those below ``nanstop run`` do."""
    from nanstop.process.inject.variables import INJECTION

    paths = os.pathsep.join((str(INJECTION), _environment()["PYTHONPATH"]))
    return {"NANSTOP_RUN": "warm", "PYTHONPATH": paths}
