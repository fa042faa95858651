"""Runs a seed scenario three times:
as published, watched to the end, and in float32 for comparison.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanstop.demo.quiet import quiet
from nanstop.demo.scenario import Scenario, Setup
from nanstop.diagnose.diagnose import diagnose
from nanstop.records import AuditEntry, Evidence, Report, RunFacts, Series, SourceLine
from nanstop.records.remedies import describe

Echo = Callable[[str], None]
LogEntry = dict[str, Any]

SHOWN = ("step", "loss", "grad_norm", "rewards/chosen", "rewards/margins", "mean_reward")
"""What is shown of a log line."""
LOSES_STEP = ("skip", "stop", "observe")
"""Actions after which this step's update did not happen, or happened with bad gradients."""


def run(scenario: Scenario, *, variant: str | None = None, echo: Echo | None = None) -> LogEntry:
    """Return what ``nanstop demo --json`` prints: plain JSON values, non-finite numbers as strings.

    Of a scenario with variants and none chosen: ``variants`` holds the result of each, ``verdict``
    is "proven" if all are. ``echo`` receives lines while it runs (default: stderr).
    """
    say = echo or to_stderr
    if not scenario.variants or variant is not None:
        return _run_one(scenario, variant, say)
    results = [_run_one(scenario, name, say) for name, _ in scenario.variants]
    proven = all(result["verdict"] == "proven" for result in results)
    return {
        "name": scenario.name,
        "title": scenario.title,
        "verdict": "proven" if proven else "plausible",
        "variants": results,
        "seconds": round(sum(result["seconds"] for result in results), 2),
    }


def _run_one(scenario: Scenario, variant: str | None, echo: Echo) -> LogEntry:
    label = f"{scenario.name} {variant}" if variant else scenario.name
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        setup = Setup(out=Path(folder), steps=scenario.steps, variant=variant)
        echo(f"\n{label}: {scenario.title}\n\nWithout nanstop ({scenario.symptom}):")
        symptom, decoded = _symptom(scenario, setup)
        for line in (*map(log_line, symptom[:4]), *decoded):
            echo(f"  {line}")
        echo("\nThe same run, watched:")
        watched = _watched(scenario, setup)
        reference = _reference(scenario, setup)
    cause = dict(scenario.variants).get(variant or "", "")
    return {
        "name": scenario.name,
        "title": scenario.title,
        **({"variant": variant, "planted": cause} if variant else {}),
        "symptom": [_plain(log) for log in symptom],
        "decoded": decoded,
        **watched,
        "reference_loss": _number(reference),
        "seconds": round(time.perf_counter() - began, 2),
    }


@quiet()
def _symptom(scenario: Scenario, setup: Setup) -> tuple[list[LogEntry], list[str]]:
    """Train a few steps as published;
    return the logs and what their misleading numbers really were.
    """
    short = replace(setup, out=setup.out / "published", steps=scenario.symptom_steps)
    trainer = scenario.build(short)
    trainer.train()
    logs = _losses(trainer)
    facts = RunFacts(
        num_micro=trainer.args.gradient_accumulation_steps,
        logging_steps=int(trainer.args.logging_steps),
        nan_inf_filter=trainer.args.logging_nan_inf_filter,
    )
    return logs, _decoded(facts, logs)


def _decoded(facts: RunFacts, logs: Sequence[LogEntry]) -> list[str]:
    """Return one line for the first log that the filter has falsified."""
    for count in range(1, len(logs) + 1):
        seen = logs[:count]
        steps = tuple(int(log["step"]) for log in seen)
        series = tuple(
            Series(name=name, steps=steps, values=tuple(float(log[key]) for log in seen))
            for name, key in (("loss_logged", "loss"), ("grad_norm", "grad_norm"))
        )
        found = diagnose(Evidence(facts=facts, series=series), "gauge")
        for diagnosis in found:
            if diagnosis.code == "NS801":
                return [f"NS801 {diagnosis.title}: {diagnosis.cause}; {diagnosis.lines[0]}"]
    return []


@quiet()
def _watched(scenario: Scenario, setup: Setup) -> LogEntry:
    """Train to the end under ``nanstop.watch``, save, and return what was found and what became
    of the run.
    """
    import nanstop
    from nanstop.session.factory import incident_folder

    own = replace(setup, out=setup.out / "watched")
    name = "-".join(filter(None, (scenario.name, setup.variant)))
    trainer = scenario.build(own)
    began = time.perf_counter()
    with nanstop.watch(
        trainer,
        policy=nanstop.Policy(allow=scenario.allow),
        out=incident_folder() / "demo" / name,
    ) as watch:
        trainer.train()
        seconds = time.perf_counter() - began
        trainer.save_model(str(own.out / "final"))
        reports = watch.incidents
        folder = watch.folder
    return {
        **_incident(reports, folder),
        "incidents": len(reports),
        "findings": [finding.code for finding in watch.findings],
        "lost_steps": _lost_steps(reports, setup.steps, trainer.state.global_step),
        "final_loss": _number(final_loss(_losses(trainer))),
        "checkpoint_finite": checkpoint_is_finite(own.out / "final"),
        "steps": trainer.state.global_step,
        "seconds_watched": round(seconds, 2),
    }


@quiet()
def _reference(scenario: Scenario, setup: Setup) -> float:
    """Train as long in float32; return its final loss."""
    trainer = scenario.build(replace(setup, out=setup.out / "float32", float32=True))
    trainer.train()
    return final_loss(_losses(trainer))


def _incident(reports: Sequence[Report], folder: Path) -> LogEntry:
    """Return what the first incident says, with the folder of its full record."""
    if not reports:
        nothing = ("code", "module", "op", "source", "phase", "verdict", "remedy", "action")
        return {"codes": [], "folder": str(folder)} | dict.fromkeys(nothing)
    report = reports[0]
    event = report.localization.first_bad if report.localization else None
    proof = report.proof
    actions = [entry.action.kind for entry in report.audit]
    return {
        "code": report.diagnoses[0].code,
        "codes": [diagnosis.code for diagnosis in report.diagnoses],
        "cause": report.diagnoses[0].cause,
        "module": event.module if event else None,
        "op": event.op if event else None,
        "source": _place(event.source if event else None),
        "phase": event.phase if event else report.incident.phase,
        "verdict": proof.verdict if proof else None,
        "remedy": describe(proof.minimal) if proof and proof.minimal else None,
        "action": actions[-1] if actions else None,
        "count": report.count,
        "folder": str(folder / report.incident.id),
    }


def _lost_steps(reports: Sequence[Report], planned: int, reached: int) -> int:
    """Return how many planned updates did not happen, or happened with bad gradients."""
    entries: list[AuditEntry] = [entry for report in reports for entry in report.audit]
    lost = {entry.at.step for entry in entries if entry.action.kind in LOSES_STEP}
    return len({step for step in lost if step < reached}) + planned - reached


def _losses(trainer: Any) -> list[LogEntry]:
    return [log for log in trainer.state.log_history if "loss" in log]


def final_loss(logs: Sequence[LogEntry]) -> float:
    """Return the mean logged training loss of the last third of a run, of one log at least;
    NaN for a bad one.
    """
    last = logs[-max(1, len(logs) // 3) :]
    values = [float(log["loss"]) for log in last]
    norms = [float(log.get("grad_norm", 0.0)) for log in last]
    return sum(values) / len(values) if all(map(math.isfinite, norms)) else math.nan


def checkpoint_is_finite(folder: Path) -> bool:
    """Return whether weights were saved there, every one of them finite. Reads all of them."""
    import torch
    from safetensors.torch import load_file

    files = sorted(folder.rglob("*.safetensors"))
    return bool(files) and all(
        bool(torch.isfinite(tensor).all())
        for file in files
        for tensor in load_file(file).values()
        if tensor.is_floating_point()
    )


def log_line(log: Mapping[str, Any]) -> str:
    """Return a log as the trainer prints it, its chief entries only."""
    kept = {name: log[name] for name in SHOWN if name in log}
    parts = (f"'{name}': {_short(value)}" for name, value in kept.items())
    return "{" + ", ".join(parts) + "}"


def render(result: Mapping[str, Any]) -> str:
    """Return a result of ``run`` as a few lines of text."""
    if "variants" in result:
        return "\n\n".join(render(each) for each in result["variants"])
    lost = result["lost_steps"]
    rows = (
        ("scenario", " ".join(filter(None, (result["name"], result.get("variant"))))),
        ("planted", result.get("planted")),
        ("found", ", ".join(result["codes"]) or "nothing"),
        ("remedy", f"{result['remedy']} [{result['verdict']}]" if result["remedy"] else None),
        ("steps", f"{result['steps']}, {lost} lost"),
        ("loss", f"{result['final_loss']:.5g}, in float32 {result['reference_loss']:.5g}")
        if isinstance(result["final_loss"], float) and isinstance(result["reference_loss"], float)
        else ("loss", f"{result['final_loss']}, in float32 {result['reference_loss']}"),
        ("saved", "finite" if result["checkpoint_finite"] else "not finite, or refused"),
        ("record", result["folder"]),
    )
    return "\n".join(f"{name:10} {value}" for name, value in rows if value is not None)


def _place(source: SourceLine | None) -> str | None:
    return f"{source.file}:{source.line}" if source else None


def _number(value: float) -> float | str:
    """Return a finite number as it is; JSON has no other, so those become "nan", "inf", "-inf"."""
    return value if math.isfinite(value) else str(value)


def _plain(log: Mapping[str, Any]) -> LogEntry:
    return {
        name: _number(value) if isinstance(value, float) else value for name, value in log.items()
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def to_stderr(line: str) -> None:
    """Print a line beside the result."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
