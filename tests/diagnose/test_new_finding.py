"""The tool that begins a finding: what it writes is complete but for what it prints as left."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARGUMENTS = ("NS199", "green-cheese", "--title", "the moon is made of cheese")


def begin(root, *arguments):
    tool = root / "tools" / "new_finding.py"
    return subprocess.run(
        [sys.executable, str(tool), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(root / "src")},
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("NS504", *ARGUMENTS[1:]), "NS504 is taken"),
        (("NS901", *ARGUMENTS[1:]), "the first from 1 to 8"),
        (("NS199", "Green_Cheese", *ARGUMENTS[2:]), "kebab case"),
        ((*ARGUMENTS, "--family", "cheese"), "no file of src/nanstop/faults"),
    ],
)
def test_what_cannot_be_begun_is_refused(arguments, said):
    done = begin(ROOT, *arguments)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_a_begun_finding_passes_but_for_what_is_left(tmp_path):
    for folder in ("src", "tests", "tools", "docs", "changes"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = begin(tmp_path, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"),
            *("-n", "0", "tests/diagnose", "tests/faults", "tests/test_surface.py"),
            *("-k", "NS199 or catalogue or codes or generated or zoo or every_fi"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
    )
    red = set(re.findall(r"^FAILED \S+::(test_\w+)", checked.stdout, re.MULTILINE))
    assert red == set(re.findall(r"(?<= )test_\w+", done.stdout))
    assert "NS199 has no Chinese page yet" in checked.stdout
    linted = [sys.executable, "-m", "ruff", "check", "src", "tests"]
    assert subprocess.run(linted, check=False, cwd=tmp_path).returncode == 0
    formatted = [sys.executable, "-m", "ruff", "format", "--check", "src", "tests"]
    assert subprocess.run(formatted, check=False, cwd=tmp_path).returncode == 0
