"""Begin a finding: every file that one stands in, with what is to be written marked TODO.

    python tools/new_finding.py NS118 endless-warmup --title "the warm-up is longer than the run"

writes the rule with its page, a plant with its twin, evidence that fires and evidence that does
not, a marked stub of the Chinese page, the lines of the catalogue and of the public surface, what
the changelog will say, and the generated pages. It prints what is left, and the tests that are red
until it is done. ``--when`` as in ``Rule``; ``--family`` is the file of the zoo, where that is not
the folder of the finding. Needs ruff.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "nanstop"
FAMILIES = {
    "1": "setup",
    "2": "forward",
    "3": "gradients",
    "4": "weights",
    "5": "data",
    "6": "runtime",
    "7": "objective",
    "8": "logs",
}
"""The folder of a finding by its hundred."""

RULE = '''"""{title}.

## What happened
TODO: what a user sees.

## Why it happens
TODO: the arithmetic, with numbers.

## Example
```python
TODO: a few lines that show it, with what they print
```

## Fix
1. TODO: in the order to try. Cost: TODO.

## Fix safety
TODO: what the fix changes in the training.

## Not to be confused with
TODO: findings that look alike, and what tells them apart.

## References
- https://TODO.example/an-issue-or-a-paper
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if TODO."""
    if standing(evidence).task != "TODO":
        return None
    return Diagnosis(
        code="{code}",
        title="{title_text}",
        cause="TODO: what made it, with the numbers that were met",
        confidence="likely",
        lines=("TODO: what to look at, or to do",),
    )


RULE = Rule("{code}", "{slug}", "{title_text}", check, ({when},))
'''

PLANT = '''def {plant}(value: float) -> Specimen:
    """TODO: what ``value`` does to the training."""
    return trained(Model(layer=diagonal(value)))


'''

CHINESE = "# {code} {slug}: 尚未翻译\n\n{untranslated}\n"

LEFT = """
what is left, and the tests that are red until it is done (pytest tests/diagnose tests/faults):
  the page and the check   {rule}
      test_page_is_written, test_page_gives_numbers_costs_and_sources,
      test_an_example_gives_what_it_says
  the fault and its twin   src/nanstop/faults/{family}.py
      test_fault_shows_its_sign_and_the_twin_does_not, test_fault_fails_in_plain_torch,
      test_fault_is_found
  the two pieces of evidence, and more of them   tests/diagnose/test_checks.py
      test_rule_fires, test_finding_speaks_plainly_and_names_known_remedies
  what shows that its fixes cure   tests/diagnose/fixes
      test_every_fix_of_every_page_is_in_the_table_and_no_other
  what `loss` and `grad_norm` log of it   src/nanstop/diagnose/symptoms.py
  what people say of it   src/nanstop/diagnose/said.py
      test_people_say_something_of_every_finding, test_what_is_said_of_a_finding_leads_to_it
  may come later: the Chinese page   src/nanstop/diagnose/zh/{code}.md
where it applies: role, yields_to, beside in RULE; quiet=True where plain torch notices nothing
then: python tools/generate_docs.py"""


def main() -> int:
    """Write the files of the finding that the command line names, and print what is left.
    Errors: its exit code.
    """
    given = _arguments()
    code, slug, hundred = given.code, given.slug, given.code[2]
    folder = FAMILIES[hundred]
    rule = PACKAGE / "diagnose" / "findings" / folder / f"{code.lower()}_{_name(slug)}.py"
    family = PACKAGE / "faults" / f"{given.family or folder}.py"
    words = {
        "code": code,
        "slug": slug,
        "title": given.title[:1].upper() + given.title[1:],
        "title_text": given.title,
        "when": ", ".join(f'"{each}"' for each in given.when),
    }
    rule.write_text(RULE.format(**words), encoding="utf-8")
    _enter_in_catalogue(code, f"{folder}.{rule.stem}")
    _plant(family, code, _name(slug))
    _add_evidence(code)
    _enter_in_surface(code)
    _enter_in_symptoms(code)
    fragment = f"Finding {code} (`{slug}`): {given.title}.\n"
    (ROOT / "changes" / f"{slug}.added.md").write_text(fragment, encoding="utf-8")
    written = [str(each) for each in (rule, _catalogue(), family)]
    _run("-m", "ruff", "check", "--quiet", "--select=I", "--fix", *written)
    _run("-m", "ruff", "format", "--quiet", *written)
    _write_chinese(words)
    _run(str(ROOT / "tools" / "generate_docs.py"))
    said = LEFT.format(code=code, rule=rule.relative_to(ROOT), family=family.stem)
    sys.stdout.write(f"{said}\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("code", help="NSxyz, as yet unused")
    parser.add_argument("slug", help="the bad thing, in kebab case")
    parser.add_argument("--title", required=True, help="a sentence without a full stop")
    parser.add_argument("--when", nargs="+", choices=("static", "incident", "gauge", "account"))
    parser.add_argument("--family", help="the file of src/nanstop/faults that gets the plant")
    given = parser.parse_args()
    if not re.fullmatch(r"NS[1-8]\d\d", given.code):
        parser.error(f"{given.code}: a code is NS and three digits, the first from 1 to 8")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", given.slug):
        parser.error(f"{given.slug}: a name is in kebab case, as fp16-overflow")
    if f"as {given.code}\n" in _catalogue().read_text(encoding="utf-8"):
        parser.error(f"{given.code} is taken; codes are never used again")
    if given.family and not (PACKAGE / "faults" / f"{given.family}.py").is_file():
        parser.error(f"{given.family}: no file of src/nanstop/faults")
    given.when = given.when or (["static"] if given.code[2] == "1" else ["incident"])
    return given


def _catalogue() -> Path:
    return PACKAGE / "diagnose" / "catalogue.py"


def _name(slug: str) -> str:
    return slug.replace("-", "_")


def _enter_in_catalogue(code: str, module: str) -> None:
    path = _catalogue()
    text = path.read_text(encoding="utf-8")
    line = f"from nanstop.diagnose.findings.{module} import RULE as {code}\n"
    imports, table, _ = text.partition("\nCATALOGUE: ")
    codes = sorted({*re.findall(r"RULE as (NS\d{3})$", imports, re.MULTILINE), code})
    families = [[each for each in codes if each[2] == hundred] for hundred in FAMILIES]
    rows = [own[at : at + 11] for own in families for at in range(0, len(own), 11)]
    lines = [f"    *({', '.join(row)}{',' * (len(row) == 1)}),\n" for row in rows]
    table += f"tuple[Rule, ...] = (\n    NS000,\n{''.join(lines)})\n"
    path.write_text(imports + line + table, encoding="utf-8")


def _plant(path: Path, code: str, name: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"def {name}(" not in text, f"{path}: `{name}` is taken"
    start, table, entries = text.partition("FAULTS: Mapping")
    entries = entries.rstrip().removesuffix("}")
    imports = (
        "from nanstop.faults.parts import Model, diagonal, trained\n"
        "from nanstop.faults.specimen import loss_fails, pair\n"
    )
    start = start.replace("from nanstop.faults.parts", f"{imports}from nanstop.faults.parts", 1)
    entry = f'    "{code}": pair({name}, 2.0, 1.0, loss_fails),\n}}\n'
    path.write_text(start + PLANT.format(plant=name) + table + entries + entry, encoding="utf-8")


def _add_evidence(code: str) -> None:
    path = ROOT / "tests" / "diagnose" / "test_checks.py"
    text = path.read_text(encoding="utf-8")
    fires, silent = "    *training_cases.FIRES,\n", "    *training_cases.SILENT,\n"
    text = text.replace(fires, f'    ("{code}", evidence(), "likely"),  # TODO\n{fires}')
    text = text.replace(silent, f'    ("{code}", evidence()),  # TODO\n{silent}')
    path.write_text(text, encoding="utf-8")


def _enter_in_surface(code: str) -> None:
    path = ROOT / "tests" / "test_surface.py"
    text = path.read_text(encoding="utf-8")
    before, codes, after = re.split(r"(?<=CODES = \[\n)((?:    \"NS\d{3}\",\n)+)", text)
    lines = sorted({*codes.splitlines(keepends=True), f'    "{code}",\n'})
    path.write_text(before + "".join(lines) + after, encoding="utf-8")


def _enter_in_symptoms(code: str) -> None:
    path = PACKAGE / "diagnose" / "symptoms.py"
    text = path.read_text(encoding="utf-8")
    last = '        "NS000": '
    row = f'        "{code}": "finite/finite",  # TODO: what loss and grad_norm log\n{last}'
    path.write_text(text.replace(last, row, 1), encoding="utf-8")


def _write_chinese(words: dict[str, str]) -> None:
    from nanstop.diagnose.pages import UNTRANSLATED

    page = CHINESE.format(**words, untranslated=UNTRANSLATED)
    (PACKAGE / "diagnose" / "zh" / f"{words['code']}.md").write_text(page, encoding="utf-8")


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
