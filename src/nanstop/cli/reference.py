"""Commands that print what is known: the findings, and this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanstop.cli.terminal import OK, AsJson, Lang, show
from nanstop.errors import NanstopError
from nanstop.language.choice import language

if TYPE_CHECKING:
    from nanstop.diagnose.evidence.rule import Rule


def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="NS201, or fp16-overflow.")
    ] = None,
    symptom: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='The findings that log this, most likely first: "loss 0, grad_norm nan", or what '
            "an error says.",
        ),
    ] = None,
    run_it: Annotated[
        bool, typer.Option("--run", help="Run the planted fault and its healthy twin too.")
    ] = False,
    _lang: Lang = None,
    as_json: AsJson = False,
) -> int:
    """Print the page of a finding, or list the findings that fit a log.

    A page says what happened, why, and how to fix it.
    """
    from nanstop.commands.explain.page import print_page
    from nanstop.diagnose import pages

    lang = language()
    if (code is None) == (symptom is None):
        raise NanstopError("one of CODE and --symptom", hint="nanstop explain NS201")
    if code is None:
        if run_it:
            raise NanstopError("--run goes with a CODE")
        return _fitting(symptom or "", lang, as_json)
    if not as_json:
        print_page(code, lang)
        if run_it and code.upper() != "NS001":
            typer.echo(_exhibits(pages.find_rule(code).code)[1])
        return OK
    if code.upper() == "NS001":
        page = pages.usage_error(lang)
        show(
            {"code": "NS001", "name": "usage-error", "title": "wrong usage", "page": page}, "", True
        )
        return OK
    rule, page = pages.find_rule(code), pages.explain(code, lang=lang)
    title = pages.page(rule, lang).title
    row = {"code": rule.code, "name": rule.slug, "title": title, "page": page}
    show(row | (_exhibits(rule.code)[0] if run_it else {}), "", as_json)
    return OK


def _fitting(symptom: str, lang: str, as_json: bool) -> int:
    """List the findings that log a symptom, else those of which people say what it says.

    The loss is the real one, which the log may show as 0 or a huge number.
    """
    from nanstop.diagnose import pages, symptoms
    from nanstop.diagnose.said import findings_said

    try:
        fits = symptoms.findings_that_log(symptom)
    except NanstopError:
        rules = findings_said(symptom)
        if not rules:
            raise
        return _said(rules, lang, as_json)
    rows = [
        {"code": fit.rule.code, "name": fit.rule.slug, "title": pages.page(fit.rule, lang).title}
        | {"loss": fit.loss, "grad_norm": fit.grad_norm}
        for fit in fits
    ]
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [
        f"{row['code']}  {row['name']:{width}}  "
        f"{'loss ' + row['loss']:11}  {'grad_norm ' + row['grad_norm']:16}  {row['title']}"
        for row in rows
    ]
    show(rows, "\n".join(lines) or "no finding is known to log this", as_json)
    return OK


def _said(rules: Sequence[Rule], lang: str, as_json: bool) -> int:
    from nanstop.diagnose import pages

    rows = [
        {"code": rule.code, "name": rule.slug, "title": pages.page(rule, lang).title}
        for rule in rules
    ]
    width = max(len(row["name"]) for row in rows)
    lines = [f"{row['code']}  {row['name']:{width}}  {row['title']}" for row in rows]
    show(rows, "\n".join(lines), as_json)
    return OK


def _exhibits(code: str) -> tuple[dict[str, Any], str]:
    """Return what the planted fault and its healthy twin show when they are run.

    As values, and as text.
    """
    from nanstop.commands.explain.exhibit import exhibits

    parts = dict(zip(("fault", "healthy"), exhibits(code), strict=True))
    values = {
        name: {"codes": one.codes, "losses": one.losses, "ended": one.ended}
        for name, one in parts.items()
    }
    titles = {"fault": "The planted fault, run and watched", "healthy": "Its healthy twin"}
    return values, "\n".join(f"\n## {titles[name]}\n{one.text}" for name, one in parts.items())


def rules(as_json: AsJson = False) -> int:
    """List every finding."""
    from nanstop.diagnose.catalogue import CATALOGUE

    rows = [
        {"code": rule.code, "name": rule.slug, "title": rule.title, "when": list(rule.when)}
        for rule in CATALOGUE
    ]
    width = max(len(rule.slug) for rule in CATALOGUE)
    lines = [f"{rule.code}  {rule.slug:{width}}  {rule.title}" for rule in CATALOGUE]
    show(rows, "\n".join(lines), as_json)
    return OK


def env(as_json: AsJson = False) -> int:
    """Print versions, devices and settings that decide how numbers come out."""
    from dataclasses import asdict

    from nanstop.session.machine import environment

    facts = asdict(environment(import_torch=True))
    for name in ("packages", "flags", "env_vars"):
        facts[name] = dict(facts[name])
    show(facts, "\n".join(_lines(facts)), as_json)
    return OK


def _lines(facts: dict[str, Any]) -> list[str]:
    flat = {}
    for name, value in facts.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return [f"{name:28} {value}" for name, value in flat.items() if value is not None]
