"""What a cured training writes is what the plain one would write, and is read where there is no
nanstop.
"""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import nanstop
import scripts_own
import tiny
from nanstop.records import Atom, PrecisionPlan
from nanstop.store.plan_file import save_plan
from remedies.test_ways_out import found_by_a_stranger

PLAN = PrecisionPlan(
    remedies=(
        Atom(remedy="attention", value="eager"),
        Atom(remedy="fp32_trainables"),
        Atom(remedy="island", target="model.layers.1.mlp", value="float32->input"),
    )
)


class Saving(TrainerCallback):
    """Writes whatever a callback may write, before an update and after it."""

    def __init__(self, folder):
        self.folder = folder

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.save(model, f"before-{state.global_step}")

    def on_step_end(self, args, state, control, model, **kwargs):
        self.save(model, f"after-{state.global_step}")
        model.save_pretrained(self.folder / f"after-{state.global_step}" / "pretrained")

    def save(self, model, name):
        folder = self.folder / name
        folder.mkdir(parents=True)
        torch.save(model, folder / "model.pt")
        torch.save(copy.deepcopy(model), folder / "deep.pt")
        torch.save(model.state_dict(), folder / "state.pt")
        copy.deepcopy(model).save_pretrained(folder / "pretrained-copy")


def train(folder, plan):
    torch.manual_seed(0)
    args = tiny.training_args(
        folder / "out",
        optim="adamw_torch",
        adam_epsilon=1e-4,
        save_strategy="steps",
        save_steps=1,
        max_steps=2,
        gradient_accumulation_steps=1,
    )
    trainer = Trainer(
        model=tiny.llama().half(),
        args=TrainingArguments(**args),
        train_dataset=tiny.TokenRows(),
        callbacks=[Saving(folder / "callback")],
    )
    if plan is not None:
        nanstop.watch(trainer, out=folder.parent / "nanstop", plan=plan)
    trainer.train()
    trainer.save_model(folder / "end")


@pytest.mark.slow
def test_a_trainer_under_remedies_writes_what_the_plain_one_writes(tmp_path):
    train(tmp_path / "all" / "plain", None)
    train(tmp_path / "all" / "cured", PLAN)
    found = found_by_a_stranger(tmp_path / "all")
    plain = {n[6:]: one for n, one in found.items() if n.startswith("plain/")}
    cured = {n[6:]: one for n, one in found.items() if n.startswith("cured/")}
    assert {n for n in cured if "nanstop" not in n} == plain.keys()
    kinds = ("model.safetensors", "config.json", ".pt")
    compared = [name for name in plain if name.endswith(kinds)]
    assert len(compared) > 20
    for name in compared:
        assert cured[name] == plain[name], name


SCRIPT = """
import copy, sys, warnings
import torch
from scripts_own import IDS, Net

torch.manual_seed(0)
model = Net().half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # its eps is 0 in float16
start = copy.deepcopy(model)
average = torch.optim.swa_utils.AveragedModel(model)
for step in range(6):
    model(IDS).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    if step == 3:
        reference = copy.deepcopy(model)
        torch.save(model, "out/model.pt")
        torch.save(reference, "out/reference.pt")
        torch.save(average, "out/average.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, "out/state.pt")
        read = torch.load("out/state.pt", weights_only=True)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
print({str(p.dtype) for p in model.parameters()}, bool(model(IDS).isfinite().all()))
reference(IDS), average(IDS)
"""


WORKERS = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from scripts_own import IDS, Net


class Rows(Dataset):
    def __init__(self, model):
        self.model = model  # goes to each worker

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return IDS[index % len(IDS)], {str(p.dtype) for p in self.model.parameters()}


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # its eps is 0 in float16
    rows = Rows(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(3):
        loader = DataLoader(
            rows, batch_size=4, num_workers=1, multiprocessing_context="spawn", collate_fn=list
        )
        for batch in loader:
            ids = torch.stack([ids for ids, _ in batch])
            accelerator.backward(model(ids).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state(f"out/{epoch}")
    print(*{str(kind) for _, kind in batch}, bool(model(IDS).isfinite().all()))


if __name__ == "__main__":
    main()
"""


def run(folder, *launcher, script=SCRIPT):
    (folder / "out").mkdir(parents=True)
    shutil.copy(scripts_own.__file__, folder)
    (folder / "train.py").write_text(script)
    command = [sys.executable, *launcher, "train.py"]
    variables = {**os.environ, "NANSTOP_DIR": str(folder / "found")}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_loop_that_is_cured_writes_what_the_plain_one_writes(tmp_path):
    plain = run(tmp_path / "plain")
    assert plain.stdout.strip() == "{'torch.float16'} False", plain.stderr
    cured = run(tmp_path / "cured", "-m", "nanstop", "run")
    assert cured.returncode == 0, cured.stderr
    assert cured.stdout.strip().endswith("True"), cured.stderr
    summary = tmp_path / "cured" / "found" / "summary.json"
    (incident,) = json.loads(summary.read_text())["incidents"]
    assert incident["action"] == "rollback"
    expected = found_by_a_stranger(tmp_path / "plain" / "out")
    assert found_by_a_stranger(tmp_path / "cured" / "out") == expected
    assert not [one for one in expected.values() if isinstance(one, str)]


@pytest.mark.slow
def test_workers_and_saved_states_of_a_cured_loop_hold_what_the_plain_ones_hold(tmp_path):
    plain = run(tmp_path / "plain", script=WORKERS)
    assert plain.stdout.strip() == "{'torch.float16'} False", plain.stderr
    cured = run(tmp_path / "cured", "-m", "nanstop", "run", script=WORKERS)
    assert cured.stdout.strip() == "{'torch.float16'} True", cured.stderr
    expected = found_by_a_stranger(tmp_path / "plain" / "out")
    assert found_by_a_stranger(tmp_path / "cured" / "out") == expected


@pytest.mark.parametrize("ending", ["", "applied.close()"])
def test_a_plan_stays_in_force_though_nobody_keeps_it_and_the_interpreter_ends_in_peace(
    tmp_path, ending
):
    save_plan(PrecisionPlan(trainables="float32"), tmp_path / "plan.yaml")
    name = "applied = " if ending else ""
    script = (
        "import gc, torch, nanstop\n"
        "model = torch.nn.Linear(4, 4).half()\n"
        f"{name}nanstop.load_plan('plan.yaml').apply(model)\n"
        "gc.collect()\n"
        "print(model.weight.dtype)\n"
        f"{ending}\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("torch.float32\n", "")
