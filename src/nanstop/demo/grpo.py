"""S3: GRPO of a Qwen2 that dies by SIGFPE on an H20 with bf16=True (TRL issue 2906).

Other scenarios are failures inside a process; here the process is gone. The watched run names the
operation, the bisect of both configurations names the setting, and the facts of the published
machine name the library to update.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanstop.commands.bisect.bisect import run_bisect
from nanstop.commands.bisect.configs import read_pair
from nanstop.commands.bisect.result import BisectResult
from nanstop.commands.bisect.trials import Limits
from nanstop.demo.quiet import OFFLINE
from nanstop.demo.scenario import Scenario
from nanstop.diagnose.diagnose import diagnose_anew
from nanstop.process.signals import signal_name
from nanstop.records import Report
from nanstop.session.factory import incident_folder
from nanstop.store.incidents import load_report, load_summary
from nanstop.store.summary import summary_row

HERE = Path(__file__).parent
SCRIPT = HERE / "grpo_training.py"
FAILING = HERE / "grpo_failing.yaml"
SIMPLE = HERE / "grpo_simple.yaml"

H20: Mapping[str, str] = {"gpu": "NVIDIA H20", "capability": "9.0", "cublas": "12.1.3.1"}
"""The machine of the published failure."""
TIMEOUT = 600.0


def play(scenario: Scenario, echo: Callable[[str], None]) -> dict[str, Any]:
    """Return what ``nanstop demo --json`` prints: plain JSON values."""
    began = time.perf_counter()
    records = (incident_folder() / "demo" / scenario.name).absolute()
    with TemporaryDirectory() as folder:
        echo(f"\n{scenario.name}: {scenario.title}\n\nWithout nanstop ({scenario.symptom}):")
        bare = _run([sys.executable, *_training()], folder)
        echo(f"  exit code {bare.returncode}: killed by {signal_name(bare.returncode)}")
        echo("\nThe same run, recorded:")
        watch = [sys.executable, "-m", "nanstop", "run", "--record", "--out", str(records)]
        watched = _run([*watch, *_training()], folder)
        report = _report(records)
        echo("\nWhich setting, of two configurations:")
        found = run_bisect(
            read_pair(str(FAILING), str(SIMPLE), str(SCRIPT)),
            limits=Limits(timeout=TIMEOUT),
            folder=folder,
            announce=lambda line: echo(f"  {line}"),
        )
    return {
        "name": scenario.name,
        "title": scenario.title,
        "symptom": signal_name(bare.returncode),
        **_incident(report, records),
        "survived": report is not None and watched.returncode == 128 - bare.returncode,
        "exit": watched.returncode,
        **_bisected(found),
        "seconds": round(time.perf_counter() - began, 2),
    }


def on_h20(report: Report) -> Report:
    """Return the report as if it had come from the published machine, diagnosed anew."""
    incident = report.incident
    machine = replace(incident.environment, **H20)
    return diagnose_anew(replace(report, incident=replace(incident, environment=machine)))


def render(result: Mapping[str, Any]) -> str:
    """Return a result of ``play`` as a few lines of text."""
    rows = (
        ("scenario", result["name"]),
        ("found", ", ".join(result["codes"]) or "nothing"),
        ("op", f"{result['op']} in {result['module']}, {result['phase']}, step {result['step']}"),
        ("setting", f"{', '.join(result['minimal']) or 'none'} [{result['trials']} trials]"),
        ("on an H20", result["known_defect"]),
        ("record", result["folder"]),
    )
    return "\n".join(f"{name:10} {value}" for name, value in rows if value is not None)


def _training() -> list[str]:
    return [str(SCRIPT), "--config", str(FAILING)]


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def _report(records: Path) -> Report | None:
    """Return the report of the last incident that the run's summary names."""
    rows = load_summary(records / "summary.json").incidents
    return load_report(records / rows[-1].folder) if rows else None


def _incident(report: Report | None, records: Path) -> dict[str, Any]:
    if report is None:
        nothing = ("code", "op", "module", "source", "phase", "step", "known_defect")
        return {"codes": [], "folder": str(records)} | dict.fromkeys(nothing)
    there = on_h20(report)
    row = summary_row(report)
    known = [one.cause for one in there.diagnoses if one.code == "NS108"]
    return {
        "code": row.code,
        "codes": [one.code for one in there.diagnoses],
        "cause": report.diagnoses[0].cause,
        "op": row.op,
        "module": row.module,
        "source": row.source,
        "phase": row.phase,
        "step": row.step,
        "known_defect": known[0] if known else None,
        "folder": str(records / report.incident.id),
    }


def _bisected(found: BisectResult) -> dict[str, Any]:
    return {
        "minimal": list(found.minimal),
        "sufficient_fix": list(found.sufficient_fix),
        "differing_keys": len(found.differences),
        "trials": len(found.trials),
        "bisect": found.status,
        "verdict": "proven" if found.status == "found" and found.minimal else "none_found",
    }
