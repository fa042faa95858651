"""What will go wrong with a run, said before its first step.

Facts and a probe against the findings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nanstop.commands.check.result import Preflight
from nanstop.diagnose.diagnose import Examination, examine
from nanstop.errors import NanstopError, unknown
from nanstop.process.inject.dry_run import dry_run
from nanstop.records import Diagnosis, Environment, Evidence, RunFacts, SourceLine
from nanstop.records.codec import from_json
from nanstop.records.vocabulary import RANK
from nanstop.session.machine import environment
from nanstop.store.config_file import CONFIGS, config_lines, not_found
from nanstop.store.files import read_text

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_MAX_MACHINE_BYTES = 2**20


def check_script(
    command: Sequence[str], *, static: bool = False, machine: Environment | None = None
) -> Preflight:
    """Return what is found of a script's first training, which does not take place.

    See ``dry_run`` for errors.

    ``static``: look at facts only and run nothing.
    """
    seen = dry_run(command, f"{__package__}.job", Preflight, options={"static": static})
    return preflight(seen, machine)


def is_checkpoint(command: Sequence[str]) -> bool:
    """Return whether this is a file of weights or a folder that is no program.

    Errors: NS001 where it has arguments.
    """
    path = Path(command[0]) if command else Path()
    folder = path.is_dir() and not (path / "__main__.py").is_file()
    if not folder and path.suffix not in _WEIGHTS:
        return False
    if len(command) > 1:
        raise NanstopError(f"{path} is a checkpoint and takes no arguments")
    return True


def check_checkpoint(path: Path) -> Preflight:
    """Return what a scan of a checkpoint finds. Errors: ``NanstopError`` as ``scan``."""
    from nanstop.commands.scan.scan import facts_of, findings, scan

    began = time.perf_counter()
    found = scan(path)
    return Preflight(
        facts=replace(facts_of(found), host=str(path)),
        environment=environment(),
        findings=findings(found),
        seconds=time.perf_counter() - began,
    )


def check_config(path: Path, machine: Environment | None = None) -> Preflight:
    """Return what is found of the run that a config file of TRL describes.

    A finding has the line of the one key without which it is not found. Errors: as ``read_config``.
    """
    from nanstop.hosts.trainer.trl_config import read_config

    facts, unclear = read_config(path)
    seen = Preflight(
        facts=facts,
        environment=environment(import_torch=True),
        failures=(unclear,) if unclear else (),
    )
    found = preflight(seen, machine)
    return replace(found, findings=_with_lines(path, found, machine)) if found.findings else found


def _with_lines(path: Path, found: Preflight, machine: Environment | None) -> tuple[Diagnosis, ...]:
    """Return the findings with the line of the key that makes each, where one key alone does.

    Each key is left out in turn. A run of another model, or by another trainer, says nothing: there
    is less to know of it.
    """
    from nanstop.hosts.trainer.trl_config import read_config

    makes: dict[str, list[SourceLine]] = {one.code: [] for one in found.findings}
    for key, line in config_lines(path).items():
        try:
            facts, _ = read_config(path, without=key)
        except Exception:  # TRL refuses what is left, or its own code fails at it
            continue
        if (facts.host, facts.model_type) != (found.facts.host, found.facts.model_type):
            continue
        left = preflight(Preflight(facts=facts, environment=found.environment), machine).findings
        for code in makes.keys() - {one.code for one in left}:
            makes[code].append(line)
    lines = {code: made[0] for code, made in makes.items() if len(made) == 1}
    return tuple(replace(one, source=one.source or lines.get(one.code)) for one in found.findings)


def is_config(command: Sequence[str]) -> bool:
    """Return whether this is a config file by itself.

    Errors: ``NanstopError`` NS001 for one that has arguments.
    """
    path = Path(command[0]) if command else Path()
    if path.suffix not in CONFIGS:
        return False
    if not path.is_file():
        raise not_found(path)
    if len(command) > 1:
        raise NanstopError(
            f"{path} is a config file and takes no arguments",
            hint=f"with a script: nanstop check train.py --config {path}",
        )
    return True


def preflight(seen: Preflight, machine: Environment | None = None) -> Preflight:
    """Return ``seen`` with its findings, best first. Pure: nothing is run or read here.

    ``machine``: the facts of another machine, for a run that will not happen on this one.
    """
    if machine is not None:
        seen = replace(seen, environment=machine, facts=_elsewhere(seen.facts, machine))
    evidence = Evidence(
        facts=seen.facts,
        environment=seen.environment,
        probe=seen.probe,
        ranges=seen.probe.ranges if seen.probe is not None else (),
    )
    found = examine(evidence, "static")
    if seen.probe is not None:
        found = _merged(found, examine(evidence, "gauge"))
    return replace(seen, findings=found.diagnoses, failures=(*seen.failures, *found.failures))


def _merged(first: Examination, second: Examination) -> Examination:
    """Return both kinds of findings, each code once, the most certain first."""
    codes = {diagnosis.code for diagnosis in first.diagnoses}
    new = [one for one in second.diagnoses if one.code not in codes and one.code != "NS000"]
    ordered = sorted((*first.diagnoses, *new), key=lambda one: (RANK[one.confidence], one.code))
    return Examination(tuple(ordered), tuple(dict.fromkeys((*first.failures, *second.failures))))


def _elsewhere(facts: RunFacts, machine: Environment) -> RunFacts:
    """Return the facts that the run would have on a machine with a GPU.

    There it computes as its options say.
    """
    if machine.gpu is None and machine.capability is None:
        return facts
    asked = facts.precision.requested if facts.precision is not None else None
    return replace(facts, device="cuda", autocast=facts.autocast or asked)


def read_machine(path: Path) -> Environment:
    """Return the machine that a file describes.

    What ``nanstop env --json`` prints there, or a part of it.

    Errors: ``NanstopError`` NS001 for a file that cannot be read or says something else.
    """
    try:
        plain = json.loads(read_text(path, _MAX_MACHINE_BYTES))
    except ValueError as error:
        raise NanstopError(f"{path}: not JSON ({error})", hint="nanstop env --json") from error
    if not isinstance(plain, dict):
        raise NanstopError(f"{path}: not the facts of a machine", hint="nanstop env --json")
    known = [each.name for each in fields(Environment)]
    strange = next((name for name in plain if name not in known), None)
    if strange is not None:
        raise unknown(f"fact of a machine in {path}", strange, known)
    told: dict[str, Any] = {"nanstop": "unknown", "python": "unknown"} | plain
    for name in ("packages", "flags", "env_vars"):
        pairs = told.get(name) or {}
        if not isinstance(pairs, dict):
            raise NanstopError(f"{path}: {name} is a mapping of names to values")
        told[name] = tuple((key, str(value)) for key, value in pairs.items())
    return from_json(Environment, json.dumps(told))
