"""The public surface, frozen: whoever changes it changes this file in the same commit, and the
changelog.
"""

import dataclasses
import hashlib
import inspect
import json
import typing

import pytest
import typer.main

import nanstop
from nanstop import cli
from nanstop.decide.policy import OnFailure, OnStop, Policy
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.records import SCHEMA, Report
from nanstop.records.codec import schema
from nanstop.records.remedies import REMEDIES
from nanstop.store.summary import FindingRow, IncidentRow, Summary

CODES = [
    "NS000",
    "NS101",
    "NS102",
    "NS103",
    "NS104",
    "NS105",
    "NS106",
    "NS107",
    "NS108",
    "NS109",
    "NS110",
    "NS111",
    "NS112",
    "NS113",
    "NS114",
    "NS115",
    "NS116",
    "NS117",
    "NS118",
    "NS119",
    "NS201",
    "NS202",
    "NS203",
    "NS204",
    "NS205",
    "NS206",
    "NS207",
    "NS208",
    "NS209",
    "NS301",
    "NS302",
    "NS303",
    "NS304",
    "NS305",
    "NS306",
    "NS307",
    "NS401",
    "NS402",
    "NS403",
    "NS404",
    "NS501",
    "NS502",
    "NS503",
    "NS504",
    "NS505",
    "NS506",
    "NS601",
    "NS602",
    "NS603",
    "NS604",
    "NS605",
    "NS606",
    "NS607",
    "NS701",
    "NS702",
    "NS703",
    "NS704",
    "NS801",
    "NS802",
]

COMMANDS = {
    "demo": ["name", "--list", "--variant", "--json"],
    "run": [
        "command",
        "--on-failure",
        "--out",
        "--on-stop",
        "--allow",
        "--record",
        "--series",
        "--hang",
        "--audit-devices",
        "--show-text",
        "--quiet",
        "--live",
        "--lang",
        "--json",
    ],
    "check": ["command", "--static", "--machine", "--sarif", "--lang", "--json"],
    "report": ["folder", "--full", "--html", "--show-text", "--issue", "--lang", "--json"],
    "view": ["folders", "--port", "--json"],
    "replay": ["folder", "command", "--lang", "--json"],
    "fix": ["folder", "--diff", "--apply", "--lang", "--json"],
    "prove": ["folder", "command", "--cure", "--steps", "--lang", "--json"],
    "export": ["folder", "--out", "--dtype", "--data", "--json"],
    "scan": ["checkpoint", "--full", "--json"],
    "bisect": [
        "bad",
        "good",
        "--script",
        "--jobs",
        "--timeout",
        "--memory",
        "--limit",
        "--executor",
        "--lang",
        "--json",
    ],
    "lr-range": ["command", "--low", "--high", "--steps", "--lang", "--json"],
    "doctor": ["command", "--lang", "--json"],
    "compare": ["first", "second", "--tolerance", "--json"],
    "plan": ["target", "--dtype", "--data", "--lr", "--seconds", "--out", "--lang", "--json"],
    "explain": ["code", "--symptom", "--run", "--lang", "--json"],
    "rules": ["--json"],
    "env": ["--json"],
}

REPORT_FORM = (1, "6c179bfe236f09c0")


def test_names():
    assert dir(nanstop) == [
        "Callback",
        "NanstopError",
        "Policy",
        "Report",
        "TrainingStopped",
        "__version__",
        "check",
        "compare",
        "explain",
        "investigate",
        "load",
        "load_plan",
        "plan",
        "watch",
    ]
    with pytest.raises(AttributeError, match="has no attribute 'wach'"):
        _ = nanstop.wach


def test_commands_and_flags():
    group = typer.main.get_command(cli.app)
    found = {
        name: [
            next((opt for opt in one.opts if opt.startswith("--")), one.name)
            for one in command.params
        ]
        for name, command in group.commands.items()
    }
    assert found == COMMANDS


def test_exit_codes():
    codes = (cli.OK, cli.FINDINGS, cli.USAGE, cli.UNRESOLVED, cli.INTERNAL, cli.INTERRUPTED)
    assert codes == (0, 1, 2, 3, 70, 130)


def test_codes_of_findings():
    assert [rule.code for rule in CATALOGUE] == CODES


def test_policy():
    defaults = {field.name: field.default for field in dataclasses.fields(Policy)}
    assert defaults == {
        "on_failure": "repair",
        "allow": (),
        "max_skips_in_a_row": 32,
        "on_stop": "raise",
        "budget_seconds": 60.0,
        "budget_trials": 40,
        "quiet": False,
        "show_text": False,
        "audit_devices": 0,
    }
    assert typing.get_args(OnFailure) == ("repair", "skip", "stop", "observe")
    assert typing.get_args(OnStop) == ("raise", "end")
    changing = sorted(name for name, cure in REMEDIES.items() if cure.safety == "changes_training")
    assert changing == [
        "bf16",
        "clip",
        "drop_micro",
        "drop_sample",
        "finite_constant",
        "finite_fill",
        "form",
        "init_rows",
        "loss_scale",
        "lr",
        "optimizer_eps",
        "optimizer_swap",
        "unscale",
        "weight_decay",
    ]


def names(record):
    return [field.name for field in dataclasses.fields(record)]


def test_summary_keys():
    assert names(Summary) == [
        "schema",
        "incidents",
        "findings",
        "exit",
        "steps",
        "seconds",
        "ended",
        "began",
        "script",
        "trained_nothing",
    ]
    assert names(FindingRow) == [
        "code",
        "title",
        "where",
        "confidence",
        "step",
        "micro",
        "phase",
        "op",
        "cause",
        "lines",
        "mended_by",
    ]
    assert names(IncidentRow) == [
        "code",
        "codes",
        "title",
        "phase",
        "op",
        "module",
        "source",
        "step",
        "micro",
        "rank",
        "confidence",
        "verdict",
        "remedy",
        "action",
        "count",
        "folder",
    ]


def shape(kind, seen):
    """Field names and types of a record and of every record it holds, as lines."""
    if kind.__name__ not in seen:
        seen[kind.__name__] = [f"{field.name}: {field.type}" for field in dataclasses.fields(kind)]
        for hint in typing.get_type_hints(kind).values():
            for inner in parts(hint):
                if dataclasses.is_dataclass(inner):
                    shape(inner, seen)
    return seen


def parts(hint):
    yield hint
    for argument in typing.get_args(hint):
        yield from parts(argument)


def test_report_json_has_the_published_form():
    form = json.dumps(shape(Report, {}), sort_keys=True)
    found = hashlib.sha256(form.encode()).hexdigest()[:16]
    assert (SCHEMA, found) == REPORT_FORM, (
        "report.json changed: put it in the changelog, raise SCHEMA if readers break"
    )
    assert set(schema(Report)["properties"]) == set(names(Report))


def test_explain_takes_one_code_and_a_language():
    assert (
        str(inspect.signature(nanstop.explain)) == "(code: 'str', *, lang: 'str' = 'en') -> 'str'"
    )
