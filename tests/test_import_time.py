"""Starting is cheap: what is light stays free of torch, transformers and pydantic."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", "pydantic", "rich", "typer")
PROBE = """
import json, sys, time
started = time.perf_counter()
{statement}
seconds = time.perf_counter() - started
print(json.dumps([seconds, [name for name in {heavy} if name in sys.modules]]))
"""


def probe(statement, heavy=HEAVY):
    """Seconds that ``statement`` took in a fresh interpreter, and the heavy packages it imported."""
    code = PROBE.format(statement=statement, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_import_nanstop_is_nearly_free():
    seconds, heavy = probe("import nanstop")
    assert heavy == []
    assert (
        seconds < 1
    )  # 1 ms here; the bound only catches something grossly wrong on a busy machine


@pytest.mark.parametrize(
    "statement",
    [
        "from nanstop import Policy, NanstopError, Report; Policy()",
        "import nanstop; assert 'float16' in nanstop.explain('NS201')",
        "from nanstop.rules.catalogue import CATALOGUE; from nanstop.rules.diagnose import diagnose",
        "import nanstop.run.policy, nanstop.run.environment",
    ],
)
def test_records_rules_and_policy_need_the_standard_library_only(statement):
    _, heavy = probe(statement)
    assert heavy == []


@pytest.mark.parametrize("command", [["explain", "NS201"], ["rules", "--json"], ["--version"]])
def test_light_commands_do_not_import_torch(command):
    seconds, heavy = probe(f"from nanstop.cli import main; assert main({command}) == 0")
    assert set(heavy) <= {"typer", "rich", "pydantic"}  # typer brings pydantic
    assert seconds < 3  # 0.1 s here


def test_reading_incidents_does_not_import_torch():
    _, heavy = probe("import nanstop.run.store, nanstop.report.codec, nanstop.report.text")
    assert not {"torch", "transformers", "trl", "peft", "accelerate", "numpy"} & set(heavy)


def test_every_name_of_the_surface_can_be_used():
    _, heavy = probe(
        "import nanstop\nfor name in nanstop.__all__: assert getattr(nanstop, name) is not None"
    )
    assert "transformers" not in heavy
