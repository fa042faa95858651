"""What every finding must keep:
names, headings, known remedies, an up-to-date page, a fault and a twin that differ.
"""

import importlib.util
import math
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diagnose.test_checks import FIRES, SILENT
from nanstop import cli
from nanstop.diagnose import findings
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.faults.specimen import run_plain
from nanstop.faults.table import ZOO
from nanstop.records.remedies import REMEDIES
from versions import older_than

ROOT = Path(__file__).parents[2]
HEADINGS = (
    "What happened",
    "Why it happens",
    "Example",
    "Fix",
    "Fix safety",
    "Not to be confused with",
    "References",
)
KINDS = {"account", "static", "incident", "gauge"}
BY_SERIES_ONLY = {"NS801"}

each_rule = pytest.mark.parametrize("rule", CATALOGUE, ids=lambda rule: rule.code)


def sections(rule):
    parts = re.split(r"^## (.+)$", rule.page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (text.strip() for text in parts[2::2]), strict=True))


def generated():
    path = ROOT / "tools" / "generate_docs.py"
    spec = importlib.util.spec_from_file_location("generate_docs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.files()


def test_catalogue_lists_every_file_once_and_in_order():
    files = sorted(
        name
        for module in pkgutil.walk_packages(findings.__path__, findings.__name__ + ".")
        if (name := module.name.rpartition(".")[2]).startswith("ns")
    )
    named = [f"{rule.code.lower()}_{rule.slug.replace('-', '_')}" for rule in CATALOGUE]
    assert named == files
    for rule, name in zip(CATALOGUE, named, strict=True):
        assert rule.check.__module__.rpartition(".")[2] == name


@each_rule
def test_names(rule):
    assert re.fullmatch(r"NS\d{3}", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.slug)
    assert not rule.title.endswith(".")
    assert rule.when
    assert set(rule.when) <= KINDS


@each_rule
def test_page_has_the_headings_in_order(rule):
    assert tuple(sections(rule)) == HEADINGS
    assert all(sections(rule).values())


@each_rule
def test_page_is_written(rule):
    assert "TODO" not in rule.page


@each_rule
def test_page_gives_numbers_costs_and_sources(rule):
    page = sections(rule)
    assert re.search(r"\d", page["Why it happens"])
    fixes = re.split(r"^\d+\. ", page["Fix"], flags=re.MULTILINE)[1:]
    assert fixes
    assert all("Cost:" in fix for fix in fixes)
    links = page["References"].splitlines()
    assert links
    assert all(re.fullmatch(r"- https://[\w.-]+\.\w+/\S+", link) for link in links)


@each_rule
def test_commands_that_a_page_names_exist(rule):
    known = {each.name or each.callback.__name__ for each in cli.app.registered_commands}
    assert set(re.findall(r"`nanstop ([a-z-]+)", rule.page)) <= known


@each_rule
def test_page_is_wrapped(rule):
    assert max(map(len, rule.page.splitlines())) <= 100


def test_generated_documents_are_up_to_date():
    files = generated()
    for path, text in files.items():
        if path.name == "report.schema.json" and older_than("pydantic", "2.14"):
            continue  # which leave out what the records say of themselves
        assert (ROOT / "docs" / path).read_text(encoding="utf-8") == text, (
            "run `python tools/generate_docs.py`"
        )
    docs = ROOT / "docs"
    pages = {path.relative_to(docs) for path in (docs / "rules").rglob("*") if path.is_file()}
    assert pages == {path for path in files if path.parts[0] == "rules"}


@each_rule
def test_rule_has_evidence_for_and_against(rule):
    assert rule.code in {case[0] for case in FIRES} | BY_SERIES_ONLY
    assert rule.code in {case[0] for case in SILENT} | BY_SERIES_ONLY


@pytest.mark.parametrize(("code", "given", "_confidence"), FIRES)
def test_finding_speaks_plainly_and_names_known_remedies(code, given, _confidence):
    found = next(rule for rule in CATALOGUE if rule.code == code).check(given)
    for text in (found.title, found.cause, *found.lines):
        assert text
        assert not text.endswith(".")
        assert not re.match(r"[A-Z][a-z]", text) or text.startswith("AdamW"), text
    for atoms in found.remedies:
        assert atoms
        assert {atom.remedy for atom in atoms} <= set(REMEDIES)


def test_zoo_has_every_finding():
    assert list(ZOO) == [rule.code for rule in CATALOGUE]


@pytest.mark.parametrize("code", ZOO)
def test_fault_shows_its_sign_and_the_twin_does_not(code):
    entry = ZOO[code]
    assert entry.sign(entry.fault())
    assert not entry.sign(entry.healthy())


@pytest.mark.parametrize("code", ZOO)
def test_twin_trains_without_any_failure(code):
    run = run_plain(ZOO[code].healthy())
    assert run.healthy
    # One that is 0 in theory is of the size of rounding, or 0, as the machine has it.
    assert run.largest_gradient > 1e-5


@pytest.mark.parametrize("code", [code for code in ZOO if not ZOO[code].quiet])
def test_fault_fails_in_plain_torch(code):
    assert not run_plain(ZOO[code].fault()).healthy


@pytest.mark.parametrize("code", [code for code in ZOO if ZOO[code].quiet])
def test_quiet_fault_does_not_fail(code):
    run = run_plain(ZOO[code].fault())
    assert run.healthy
    assert all(map(math.isfinite, run.losses))


def test_kernel_of_the_zoo_is_finite_in_plain_operations():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fault = ZOO["NS602"].fault()
    with sdpa_kernel(SDPBackend.MATH):
        assert run_plain(fault).healthy


def test_explaining_needs_no_torch():
    code = (
        "import sys, nanstop.diagnose.catalogue, nanstop.diagnose.diagnose; print('torch' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
