"""Write what the documentation takes from the code: a page a finding and their index in each
language, the schema of reports, and the index of the log.

``python tools/generate_docs.py`` writes, with ``--check`` it only says which files are out of date.
A test does the same.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from nanstop.diagnose import pages
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.evidence.rule import Rule
from nanstop.diagnose.symptoms import LOGGED
from nanstop.records.codec import schema

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDERS = {"en": Path("rules"), "zh": Path("rules/zh")}
WORDS = {
    "en": {
        "looked for": "Looked for: {}.",
        "comma": ", ",
        "index": """# Findings

`nanstop explain CODE` prints the same pages. [中文](zh/README.md)

A page says when its finding is looked for. `static`: in the set-up, before and during a run.
`incident`: at a failure. `gauge`: in sampled ranges and logs of a run that has not failed. What a
Trainer logs is loss / grad_norm, what is usual first; `nanstop explain --symptom "loss 0, grad_norm
nan"` reads this column. The filter of transformers shows a loss that is not finite as 0 or as a
huge number.

| code | name | says | loss / grad_norm |
|---|---|---|---|
""",
    },
    "zh": {
        "looked for": "检查时机：{}。",
        "comma": "、",
        "index": """# 诊断项

`nanstop explain CODE --lang zh` 会打印同样的页面。[English](../README.md)

每个页面都注明何时检查该项。`static`：训练前和训练中，检查配置。`incident`：发生故障时。`gauge`：训练尚未失败时，检查抽样得到的数值范围和日志。

最后一列是 Trainer 记录的 loss / grad_norm，常见的在前；
`nanstop explain --symptom "loss 0, grad_norm nan"` 查的就是这一列。
transformers 的日志过滤器会把非有限的损失显示为 0 或巨大的数。

| 代码 | 名称 | 含义 | loss / grad_norm |
|---|---|---|---|
""",
    },
}


def page(rule: Rule, lang: str = "en") -> str:
    """Return the Markdown file of a finding: its title, when it is looked for, and its page."""
    when = WORDS[lang]["looked for"].format(WORDS[lang]["comma"].join(rule.when))
    return f"# {rule.code} {rule.slug}\n\n*{when}*\n\n{pages.page(rule, lang).text}\n"


def index(lang: str = "en") -> str:
    """Return the Markdown list of all findings."""
    rows = [
        f"| [{rule.code}]({rule.code}.md) | {rule.slug} | {pages.page(rule, lang).title} | "
        f"{', '.join(LOGGED[rule.code].split())} |"
        for rule in CATALOGUE
    ]
    return WORDS[lang]["index"] + "\n".join(rows) + "\n"


def log() -> str:
    """Return the log with the index of its entries, which are as they stand there."""
    text = (DOCS / "log.md").read_text(encoding="utf-8")
    head, *entries = re.split(r"(?m)^(?=## )", text)
    titles = [entry.splitlines()[0].removeprefix("## ") for entry in entries]
    intro = head.partition("\n- [")[0].rstrip()
    rows = "\n".join(f"- [{title}](#{_anchor(title)})" for title in titles)
    return f"{intro}\n\n{rows}\n\n{''.join(entries)}"


def _anchor(title: str) -> str:
    """Return what a heading is called in links, as GitHub has it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def files() -> dict[Path, str]:
    """Return every generated file, relative to ``docs/``, with its text."""
    written = {}
    for lang, folder in FOLDERS.items():
        written |= {folder / f"{rule.code}.md": page(rule, lang) for rule in CATALOGUE}
        written[folder / "README.md"] = index(lang)
    written[Path("log.md")] = log()
    written[Path("report.schema.json")] = json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
    return written


def main() -> int:
    """Write the files that are out of date, or say which they are."""
    stale = [
        (DOCS / path, text)
        for path, text in files().items()
        if not (DOCS / path).is_file() or (DOCS / path).read_text(encoding="utf-8") != text
    ]
    for target, text in stale:
        sys.stdout.write(f"{target}\n")
        if "--check" not in sys.argv[1:]:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    return int("--check" in sys.argv[1:] and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
