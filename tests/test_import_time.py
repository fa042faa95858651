"""Starting is cheap: what is light stays free of torch, transformers and pydantic."""

import json
import os
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
    """Seconds that ``statement`` took in a fresh interpreter, and the heavy packages it
    imported.
    """
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
        "import nanstop.diagnose.catalogue, nanstop.diagnose.diagnose",
        "import nanstop.decide.policy, nanstop.session.machine",
    ],
)
def test_records_rules_and_policy_need_the_standard_library_only(statement):
    _, heavy = probe(statement)
    assert heavy == []


@pytest.mark.parametrize(
    "command",
    [["explain", "NS201"], ["explain", "--symptom", "loss 0"], ["rules", "--json"], ["--version"]],
)
def test_light_commands_do_not_import_torch(command):
    seconds, heavy = probe(f"from nanstop.cli import main; assert main({command}) == 0")
    assert set(heavy) <= {"typer", "rich", "pydantic"}  # typer brings pydantic
    assert seconds < 3  # 0.1 s here


def test_reading_incidents_does_not_import_torch():
    _, heavy = probe(
        "import nanstop.store.incidents, nanstop.records.codec, nanstop.report.text.terminal"
    )
    assert not {"torch", "transformers", "trl", "peft", "accelerate", "numpy"} & set(heavy)


NOT_YET = (
    *("pydantic", "rich", "typer", "jinja2", "yaml", "safetensors", "nanstop.report.text.terminal"),
    *(
        "nanstop.session.failing.failures",
        "nanstop.localize.localize",
        "nanstop.replay.rerun",
        "nanstop.prove",
    ),
    "nanstop.remedies",
)
"""What only a failure, a finding or a sample of the gauge needs."""

TELL = """
import json, sys
print(json.dumps([name for name in {names} if name in sys.modules]))
"""

LOOP = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    model(torch.rand(8, 4)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINER = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
))
ids = torch.arange(3, 11)
settings = TrainingArguments(output_dir="out", max_steps=3, logging_steps=1, report_to=[],
                             save_strategy="no", disable_tqdm=True, use_cpu=True)
Trainer(model=model, args=settings, train_dataset=[{"input_ids": ids, "labels": ids}] * 8).train()
"""


def watched(script, folder):
    """The names of ``NOT_YET`` that a script imported by its end under ``nanstop run``, and its
    summary.
    """
    (folder / "train.py").write_text(script + TELL.format(names=NOT_YET))
    command = [sys.executable, "-m", "nanstop", "run", "train.py"]
    variables = {**os.environ, "NANSTOP_DIR": str(folder / "found")}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    summary = json.loads((folder / "found" / "summary.json").read_text())
    return json.loads(done.stdout.splitlines()[-1]), summary


def test_a_healthy_loop_imports_nothing_that_only_a_failure_needs(tmp_path):
    imported, summary = watched(LOOP, tmp_path)
    assert summary["steps"] == 3
    assert imported == []


@pytest.mark.slow
def test_a_healthy_trainer_imports_nothing_that_only_a_failure_needs(tmp_path):
    imported, summary = watched(TRAINER, tmp_path)
    assert summary["steps"] == 3
    own = {"jinja2", "rich", "safetensors", "yaml"}  # of transformers
    assert set(imported) <= own | {"nanstop.report.text.terminal"}  # which says how it ended


def test_the_parent_of_a_healthy_training_imports_nothing_heavy(tmp_path):
    (tmp_path / "script.py").write_text(LOOP)
    statement = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = ['nanstop', 'run', 'script.py']; "
        "from nanstop.__main__ import main; assert main() == 0"
    )
    _, heavy = probe(statement)
    assert heavy == []


def test_every_name_of_the_surface_can_be_used():
    _, heavy = probe(
        "import nanstop\nfor name in nanstop.__all__: assert getattr(nanstop, name) is not None"
    )
    assert "transformers" not in heavy


def test_a_loop_is_tried_where_there_is_no_transformers():
    verbs = ("check", "doctor", "lr_range", "plan")
    _, heavy = probe("\n".join(f"import nanstop.commands.{verb}.job" for verb in verbs))
    assert not {"transformers", "trl", "accelerate"} & set(heavy)
