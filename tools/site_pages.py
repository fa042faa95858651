"""The pages of the documentation site that are made from the code when the site is built.

Nothing is written here: every function returns Markdown. The findings come from their pages, the
symptoms from the table that ``nanstop explain --symptom`` reads, messages from the examples of the
pages, which the tests run, and the command line from the commands themselves.
"""

from __future__ import annotations

import re
from pathlib import Path

import generate_docs

from nanstop.diagnose import pages
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.said import said_of
from nanstop.diagnose.symptoms import KINDS, LOGGED, Fit, findings_that_log

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("en", "zh")
SUFFIX = {"en": ".md", "zh": ".zh.md"}

FAMILIES = {
    "1": "Set-up",
    "2": "Forward",
    "3": "Gradients",
    "4": "Weights",
    "5": "Data",
    "6": "Runtime",
    "7": "Objective",
    "8": "Logs",
}
RESULTS = (
    "architectures",
    "first-sight",
    "foreign",
    "forms",
    "gpu",
    "healthy",
    "metamorphic",
    "scoreboard",
    "seeds",
    "silent",
    "trainer-features",
)
COPIED = {
    **{f"docs/{name}.md": f"results/{name}.md" for name in RESULTS},
    "docs/export.md": "how-to/export.md",
    "docs/scan.md": "how-to/scan.md",
    "docs/glossary.md": "reference/glossary.md",
    "docs/log.md": "reference/log.md",
    "CONTRIBUTING.md": "reference/contributing.md",
}
"""Files of the repository that are pages of the site as they stand."""

WORDS = {
    "en": {
        "shown": {"nan": "nan", "inf": "inf", "0": "0.0", "finite": "ordinary", "huge": "huge"},
        "more": " +{}",
        "pair": "loss is {}, grad_norm is {}",
        "quiet": "loss and grad_norm are ordinary numbers, and the model is wrong",
        "ended": "the run ends before anything is logged",
        "finding": "| finding | what it says | what the loss really is |\n|---|---|---|",
        "message": "| the error begins with | finding | what it is |\n|---|---|---|",
        "logged": "A Trainer logs: {}.",
        "comma": "; ",
    },
    "zh": {
        "shown": {"nan": "nan", "inf": "inf", "0": "0.0", "finite": "正常", "huge": "巨大"},
        "more": " +{}",
        "pair": "loss 为 {}，grad_norm 为 {}",
        "quiet": "loss 和 grad_norm 看起来都正常，但模型不对",
        "ended": "还没有记录任何日志，运行就结束了",
        "finding": "| 诊断项 | 含义 | loss 的真实值 |\n|---|---|---|",
        "message": "| 报错的开头 | 诊断项 | 含义 |\n|---|---|---|",
        "logged": "Trainer 的日志：{}。",
        "comma": "；",
    },
}
LINE = {"nan": "nan", "inf": "inf", "0": "0.0", "finite": "1.3862", "huge": "1.19e+34"}
NORM = {**LINE, "finite": "0.8113", "huge": "2.4e+07"}
ORDER = ("0", "nan", "inf", "huge", "finite", "none")
"""Of the kinds of a loss: what is asked most comes first."""


def anchor(loss: str, grad_norm: str) -> str:
    """Return the id of a symptom's heading."""
    return f"loss-{loss}-grad_norm-{grad_norm}"


def symptoms() -> dict[tuple[str, str], tuple[Fit, ...]]:
    """Return what fits each pair of a loss and a gradient norm as a log shows them."""
    assert set(ORDER) == set(KINDS)
    pairs = [(loss, norm) for loss in ORDER for norm in ORDER]
    found = {pair: findings_that_log(f"loss {pair[0]}, grad_norm {pair[1]}") for pair in pairs}
    return {pair: fits for pair, fits in found.items() if fits}


def heading(loss: str, grad_norm: str, lang: str) -> str:
    """Return a symptom in words."""
    words = WORDS[lang]
    if loss == grad_norm == "none":
        return words["ended"]
    if loss == grad_norm == "finite":
        return words["quiet"]
    return words["pair"].format(words["shown"][loss], words["shown"][grad_norm])


def symptom_sections(lang: str) -> str:
    """Return a section a symptom: its line of a log, and its findings, most likely first."""
    parts = []
    for (loss, norm), fits in symptoms().items():
        parts.append(f"## {heading(loss, norm, lang)} {{ #{anchor(loss, norm)} }}")
        if loss != "none":
            parts.append(f"```text\n{{'loss': {LINE[loss]}, 'grad_norm': {NORM[norm]}}}\n```")
        rows = [
            f"| {finding_link(fit.rule, '../')} | {pages.page(fit.rule, lang).title} "
            f"| {LINE.get(fit.loss, '-')} |"
            for fit in fits
        ]
        parts.append(WORDS[lang]["finding"] + "\n" + "\n".join(rows))
    return "\n\n".join(parts)


def symptom_table(lang: str) -> str:
    """Return links to the sections: a row a loss, a column a gradient norm."""
    words, found = WORDS[lang], symptoms()
    shown = [kind for kind in ORDER if kind != "none"]
    rows = [["", *(f"grad_norm {words['shown'][norm]}" for norm in shown)], ["---"] * 6]
    for loss in shown:
        cells = [
            f"[{found[loss, norm][0].rule.code}{words['more'].format(len(found[loss, norm]) - 1)}]"
            f"(#{anchor(loss, norm)})"
            if (loss, norm) in found
            else "-"
            for norm in shown
        ]
        rows.append([f"**loss {words['shown'][loss]}**", *cells])
    ended = f"[{words['ended']}](#{anchor('none', 'none')})"
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{ended}"


RAISED = re.compile(r"#\s+(\w+(?:Error|Exception): .*)$", re.MULTILINE)


def message_table(lang: str) -> str:
    """Return the errors that examples of the pages end with, and the finding of each."""
    rows = [
        f"| `{message}` | {finding_link(rule, '../')} | {pages.page(rule, lang).title} |"
        for rule in CATALOGUE
        for message in RAISED.findall(pages.page(rule).text)
    ]
    return WORDS[lang]["message"] + "\n" + "\n".join(rows)


def finding_link(rule: Rule, up: str) -> str:
    """Return a link to a finding's page from a page ``up`` folders below."""
    return f"[{rule.code} {rule.slug}]({up}findings/{rule.code}.md)"


def finding(rule: Rule, lang: str) -> str:
    """Return the page of a finding, with what is logged as links to the symptoms."""
    logged = [tuple(pair.split("/")) for pair in LOGGED[rule.code].split()]
    links = [
        f"[{heading(*pair, lang)}](../troubleshooting/index.md#{anchor(*pair)})" for pair in logged
    ]
    words = WORDS[lang]
    line = f"*{words['logged'].format(words['comma'].join(links))}*"
    title, when, text = generate_docs.page(rule, lang).split("\n\n", 2)
    return "\n\n".join([title, when + "\n" + line, text])


def finding_index(lang: str) -> str:
    """Return the list of all findings, without the links that are true in the repository alone."""
    text = generate_docs.index(lang)
    other = "[中文](zh/README.md)" if lang == "en" else "[English](../README.md)"
    assert other in text
    return text.replace(other, "")


NORM_SAID = {"nan": "nan", "inf": "inf", "0": "0.0", "finite": "finite", "huge": "huge"}
BOOSTED = {"findings/": 2.0, "troubleshooting/": 2.0}
"""How much more a page of a folder counts where people search, and how much less."""
BOOSTED |= {"results/": 0.3, "reference/": 0.3, "comparison": 0.3}


def searched(page: str, lang: str) -> dict[str, object]:
    """Return what the search is to know of a page: what people say of a finding counts most."""
    folder = next((one for one in BOOSTED if page.startswith(one)), None)
    known: dict[str, object] = {"search": {"boost": BOOSTED[folder]}} if folder else {}
    said = said_of(Path(page).stem.partition(".")[0], lang)
    if page == "troubleshooting/index.md":
        shown = [pair for pair in symptoms() if "none" not in pair]
        said = tuple(f"loss {NORM_SAID[loss]} grad_norm {NORM_SAID[norm]}" for loss, norm in shown)
    return {**known, "tags": list(said)} if said else known


def command_line() -> str:
    """Return the commands with their arguments and options, as their ``--help`` has them."""
    import typer.main

    from nanstop.cli import app

    group = typer.main.get_command(app)
    parts = ["# Command line", group.help or "", group.epilog or ""]
    for name, command in sorted(getattr(group, "commands", {}).items()):
        if command.hidden:
            continue
        parts.append(f"## nanstop {name} {{ #{name} }}")
        parts.append(_plain(command.help or ""))
        rows = [_parameter(one) for one in command.params if not getattr(one, "hidden", False)]
        if rows:
            parts.append("| argument or option | |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(filter(None, parts)) + "\n"


def _parameter(one: object) -> str:
    names = [*getattr(one, "opts", []), *getattr(one, "secondary_opts", [])]
    metavar = getattr(one, "metavar", None) or ""
    if getattr(one, "param_type_name", "") == "argument":
        shown = metavar or names[0].upper()
    else:
        shown = f"{', '.join(names)} {metavar}".strip()
    text = _plain(getattr(one, "help", None) or "").replace("\n", " ")
    return "| `{}` | {} |".format(*(part.replace("|", "\\|") for part in (shown, text)))


def _plain(text: str) -> str:
    return text.replace("\b", "").strip()


KEPT = ("tool", "cases", "detected", "exact op", "right cause (accepted)", "no false alarm")
"""Columns of the scoreboard that the comparison shows, and the last one, the overhead."""


def comparison() -> str:
    """Return the scoreboard's table with the columns that tools are told apart by."""
    text = (ROOT / "docs" / "scoreboard.md").read_text(encoding="utf-8")
    table = "| tool |" + text.partition("| tool |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    columns = [rows[0].index(name) for name in (*KEPT, "overhead")]
    lines = ("| " + " | ".join(row[at] for at in columns) + " |" for row in rows)
    return "\n".join(lines).replace(" %", "\N{NO-BREAK SPACE}%").replace(" (", "<br>(")


def silent_named() -> tuple[str, str]:
    """Return how many spellings of silent faults were named in the first run, and in the last."""
    text = (ROOT / "docs" / "silent.md").read_text(encoding="utf-8")
    first, *_, last = re.findall(r"^\| all \| (\d+)/\d+ ", text, re.MULTILINE)
    return first, last


def generated() -> dict[str, str]:
    """Return every page that is made at build time, by its path within the site's sources."""
    made = {}
    for lang in LANGUAGES:
        end = SUFFIX[lang]
        made[f"findings/index{end}"] = finding_index(lang)
        for rule in CATALOGUE:
            made[f"findings/{rule.code}{end}"] = finding(rule, lang)
    for source, target in COPIED.items():
        made[target] = (ROOT / source).read_text(encoding="utf-8")
    made["reference/cli.md"] = command_line()
    return made


def markers(lang: str) -> dict[str, str]:
    """Return what stands for each marker of a page."""
    first, last = silent_named()
    return {
        "<!-- silent first -->": first,
        "<!-- silent now -->": last,
        "<!-- symptom table -->": symptom_table(lang),
        "<!-- symptom sections -->": symptom_sections(lang),
        "<!-- message table -->": message_table(lang),
        "<!-- comparison table -->": comparison(),
    }
