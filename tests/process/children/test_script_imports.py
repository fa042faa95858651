"""What a script will import and set is read from its text;
a script that cannot be read so is started by itself.
"""

import pytest

from nanstop.process.children.script_imports import imports_of


@pytest.fixture
def read(tmp_path):
    def of(text, **beside):
        for name, content in beside.items():
            (tmp_path / f"{name}.py").write_text(content)
        (tmp_path / "train.py").write_text(text)
        return imports_of(tmp_path / "train.py")

    return of


def test_imports_are_found_wherever_they_stand(read, tmp_path):
    found = read(
        "import os, torch.nn as nn\nimport wandb\nfrom trl import *\n"
        "def main():\n    from trl import GRPOConfig, GRPOTrainer\n    from trl import GRPOConfig\n"
    )
    assert found.modules == (("torch.nn", ()), ("trl", ("GRPOConfig", "GRPOTrainer")))
    assert (found.problem, found.folder) == ("", str(tmp_path))


def test_modules_beside_the_script_are_read_and_hide_libraries_of_their_name(read):
    found = read(
        "import model\nimport datasets\n",
        model="import train\nimport peft\n",
        datasets="import numpy\n",
    )
    assert [name for name, _ in found.modules] == ["peft", "numpy"]


def test_settings_that_hold_always_are_known(read):
    found = read(
        "import os\nos.environ['A'] = '1'\nimport torch\n"
        "if __name__ == '__main__':\n"
        "    os.environ.setdefault('B', '2')\n"
        "    print(os.environ.get('C'))\n"
    )
    assert (found.variables, found.defaults, found.problem) == ({"A": "1"}, {"B": "2"}, "")


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['A'] = str(1)",
        "os.environ['A'] = b = 'x'",
        "if len(sys.argv) > 1: os.environ['A'] = '1'",
        "def f(): os.environ.setdefault('A', '1')",
        "os.environ.update(A='1')",
        "os.environ |= {'A': '1'}",
        "del os.environ['A']",
        "os.environ.pop('A')",
        "os.putenv('A', '1')",
        "load_dotenv()",
    ],
)
def test_settings_that_cannot_be_read_off_are_a_reason_to_spawn(read, text):
    found = read(f"import os, sys\nfrom os import environ\nimport torch\n{text}\n")
    assert found.problem == "what line 4 of the script does to its environment is unknown"
    assert found.modules == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import unsloth\nimport torch\n", "unsloth wants to be imported before others"),
        ("import json\n", "imports none of the libraries"),
        ("import torch\nprint(\n", "cannot be read (SyntaxError)"),
        ("import torch\0", "cannot be read"),
    ],
)
def test_scripts_that_are_started_by_themselves(read, text, problem):
    assert problem in read(text).problem


def test_a_script_that_is_not_there(tmp_path):
    assert "cannot be read (FileNotFoundError)" in imports_of(tmp_path / "x.py").problem
