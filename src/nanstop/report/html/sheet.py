"""What is no incident as a page: a healthy run, findings, a plan, two runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanstop.language.choice import language
from nanstop.records import Diagnosis, PrecisionPlan, Series
from nanstop.report.html.charts import MISSING, are_available
from nanstop.report.html.headroom import HeatMap
from nanstop.report.html.incident import Rows
from nanstop.report.html.labels import labels
from nanstop.report.html.module_tree import Fact, Node, module_tree
from nanstop.report.html.series import run_series
from nanstop.report.html.templates import FOLDER, policy_hash, template, trusted
from nanstop.report.html.timeline import Panel, panels
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.blocks.finding import finding_blocks
from nanstop.report.text.spoken import spoken


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """``said``: groups of blocks as the terminal has them. ``tables``: caption, columns, rows."""

    title: str
    said: tuple[tuple[Block, ...], ...] = ()
    tree: Node | None = None
    panels: tuple[Panel, ...] = ()
    heat: HeatMap | None = None
    tables: tuple[tuple[str, tuple[str, ...], Rows], ...] = ()

    @property
    def problem(self) -> str:
        """Why there is no chart, or ""."""
        return "" if are_available() else MISSING


def sheet_page(sheet: Sheet, lang: str | None = None) -> str:
    """Return the page. Every text is escaped; characters that do not print are replaced.
    ``lang``: None for that which is asked for.
    """
    lang = lang or language()
    style = (FOLDER / "page.css").read_text()
    return template("sheet.html.jinja").render(
        sheet=replace(sheet, said=tuple(tuple(spoken(one, lang)) for one in sheet.said)),
        style=trusted(style),
        style_hash=policy_hash(style),
        script=None,
        lang=lang,
        say=labels(lang),
    )


def lines_of(text: str) -> tuple[Block, ...]:
    """Return a text of the terminal's as blocks."""
    return tuple(Block("plain", line, ()) for line in text.splitlines())


def findings_sheet(
    findings: Sequence[Diagnosis], said: str, *, title: str, series: Sequence[Series] = ()
) -> Sheet:
    """Return findings as the terminal tells them, behind a line, with the numbers of their run."""
    return Sheet(
        title=title,
        said=(lines_of(said), *(tuple(finding_blocks(one)) for one in findings)),
        panels=tuple(
            panels(run_series((), series), (), draw=are_available(), say=labels(language()))
        ),
    )


def plan_tree(plan: PrecisionPlan) -> Node | None:
    """Return the formats of a plan, hung into the tree of the modules; None where it has none."""
    regions = [(name, one.dtype, one.reason) for one in plan.regions for name in one.modules]
    islands = [(a.target, a.value or "float32", "") for a in plan.remedies if a.remedy == "island"]
    facts = [
        (module, Fact(f"{dtype}{f': {reason}' if reason else ''}", "wide"))
        for module, dtype, reason in (*regions, *islands)
    ]
    root = f"the model: {plan.dtype}" if plan.dtype else "the model: as the run has it"
    return module_tree(facts, root) if facts else None
