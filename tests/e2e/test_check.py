"""``nanstop check`` as a user runs it:
the seed configurations are named before a step, their cures are left in peace.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SEEDS = Path(__file__).with_name("seed_training.py")
V100 = {"gpu": "Tesla V100-SXM2-32GB", "capability": "7.0"}
H20 = {"gpu": "NVIDIA H20", "capability": "9.0", "cublas": "12.1.3.1"}
LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
FAULT
for index in range(3):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pt")
"""
FROZEN = "model[0], model[2] = nn.Linear(4, 8), nn.Linear(8, 1)"


def check(folder, *words, machine=None):
    """Run ``nanstop check`` in ``folder``; return its exit code, the codes that it found, and
    all of its output.
    """
    options = ["--json"]
    if machine is not None:
        (folder / "machine.json").write_text(json.dumps(machine))
        options += ["--machine", "machine.json"]
    done = subprocess.run(
        [sys.executable, "-m", "nanstop", "check", *options, *map(str, words)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = json.loads(done.stdout) if done.returncode in (0, 1) else {"findings": []}
    return done.returncode, [one["code"] for one in found["findings"]], done


@pytest.mark.parametrize(("fault", "codes"), [("", []), (FROZEN, ["NS114"])])
def test_a_loop(tmp_path, fault, codes):
    (tmp_path / "train.py").write_text(LOOP.replace("FAULT", fault))
    code, found, done = check(tmp_path, "train.py")
    assert (code, found) == (int(bool(codes)), codes), done.stderr
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "machine", "codes"),
    [
        ("gemma3-dpo", V100, {"NS101"}),
        ("gemma3-dpo", None, {"NS101", "NS104"}),
        ("gemma-qlora-zero-rows", None, {"NS103"}),
        ("gemma-qlora-half-trainables", None, {"NS102"}),
        ("qwen2-grpo", H20, {"NS108"}),
        ("qwen2-reward", None, {"NS102", "NS110"}),
        ("qwen2-sft", V100, {"NS101"}),
    ],
)
def test_a_seed_is_named_before_a_step(tmp_path, seed, machine, codes):
    code, found, done = check(tmp_path, SEEDS, seed, machine=machine)
    assert code == 1, done.stderr
    assert codes <= set(found)
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "machine"),
    [
        ("gemma3-dpo", None),
        ("gemma-qlora-zero-rows", None),
        ("gemma-qlora-half-trainables", None),
        ("qwen2-grpo", H20 | {"cublas": "12.4.5.8"}),
        ("qwen2-reward", None),
        ("qwen2-sft", V100),
    ],
)
def test_a_cured_seed_is_left_in_peace(tmp_path, seed, machine):
    code, found, done = check(tmp_path, SEEDS, seed, "cured", machine=machine)
    assert (code, found) == (0, []), done.stderr


@pytest.mark.slow
def test_the_cure_of_one_machine_is_a_fault_of_another(tmp_path):
    code, found, done = check(tmp_path, "--static", SEEDS, "gemma3-dpo", "cured", machine=V100)
    assert (code, found) == (1, ["NS104"]), done.stderr


@pytest.mark.slow
def test_a_command_of_trl(tmp_path):
    import tiny

    model = tiny.llama()
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"w{i}", "chosen": " w1 w2", "rejected": " w3"} for i in range(40)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "dpo.yaml").write_text(
        "model_name_or_path: model\ndataset_name: data\noutput_dir: out\nuse_cpu: true\n"
        "report_to: none\nmax_steps: 20\nwarmup_steps: 50\neval_strategy: 'no'\n"
    )
    code, found, done = check(tmp_path, "trl", "dpo", "--config", "dpo.yaml")
    assert (code, found) == (1, ["NS113"]), done.stderr
    assert not list((tmp_path / "out").glob("*.safetensors"))
