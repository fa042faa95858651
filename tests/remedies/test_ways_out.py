"""Whatever leaves the process under a remedy is of the script's own classes, names and formats,
and needs no nanstop.
"""

import copy
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import scripts_own
from nanstop.hosts.model.view import PlainView
from nanstop.records import Atom
from nanstop.remedies.apply import TABLE
from nanstop.remedies.lasting import lasting
from scripts_own import IDS, Net
from versions import older_than

REMEDIES = {
    "drop_micro": Atom(remedy="drop_micro", target="0"),
    "drop_sample": Atom(remedy="drop_sample", target="0:0"),
    "init_rows": Atom(remedy="init_rows", target="table.weight", value="mean"),
    "sdpa_kernel": Atom(remedy="sdpa_kernel", value="flash"),
    "eager": Atom(remedy="eager"),
    "bf16": Atom(remedy="bf16"),
    "fp32_trainables": Atom(remedy="fp32_trainables"),
    "fp32_logits": Atom(remedy="fp32_logits"),
    "island": Atom(remedy="island", target="body", value="float32->input"),
    "stable_form": Atom(remedy="stable_form", target=f"{__file__}:1", value="log_space"),
    "form": Atom(remedy="form", target=f"{__file__}:1", value="guarded"),
    "memory_fill": Atom(remedy="memory_fill", target=f"{__file__}:1", value="0"),
    "held_fill": Atom(remedy="held_fill", target=f"{__file__}:1", value="held"),
    "finite_fill": Atom(remedy="finite_fill", target=f"{__file__}:1", value="1e4"),
    "finite_constant": Atom(remedy="finite_constant", target=f"{__file__}:1", value="1e4:mask"),
    "fp32_line": Atom(remedy="fp32_line", target=f"{__file__}:1", value="float32"),
    "outer_autocast": Atom(remedy="outer_autocast", value="float16"),
    "loss_scale": Atom(remedy="loss_scale", value="0.5"),
    "weight_decay": Atom(remedy="weight_decay", value="0"),
    "unscale": Atom(remedy="unscale", value="8"),
    "clip": Atom(remedy="clip", value="1.0"),
    "lr": Atom(remedy="lr", value="0.5"),
    "optimizer_eps": Atom(remedy="optimizer_eps", value="1e-3"),
    "fp32_optimizer_state": Atom(remedy="fp32_optimizer_state"),
    "optimizer_swap": Atom(remedy="optimizer_swap", value="adamw"),
}
"""Attention needs a model that has a switch for it: see the trainers."""

TOGETHER = ("fp32_trainables", "island", "fp32_logits", "outer_autocast", "lr", "clip")


def save_all(model, optimizer, average, folder):
    """Everything that a script writes between two steps."""
    folder.mkdir(parents=True)
    torch.save(model, folder / "model.pt")
    torch.save(model.body, folder / "part.pt")
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(model.state_dict(keep_vars=True), folder / "state-vars.pt")
    torch.save(dict(model.named_parameters()), folder / "parameters.pt")
    torch.save(copy.deepcopy(model), folder / "deep.pt")
    torch.save(copy.copy(model), folder / "shallow.pt")
    torch.save(average, folder / "average.pt")
    torch.save({"model": model, "optimizer": optimizer}, folder / "both.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(copy.deepcopy(optimizer).state_dict(), folder / "optimizer-deep.pt")


def save_graphs(model, folder):
    """What a script makes of its model for others to run."""
    model.eval()
    with warnings.catch_warnings():  # torch.jit is deprecated, and in use
        warnings.simplefilter("ignore")
        save_scripted(model, folder)
    if not older_than("torch", "2.7"):  # which cannot export what is not in float32
        torch.export.save(torch.export.export(model, (IDS,)), folder / "net.pt2")
    model.train()


def save_scripted(model, folder):
    torch.jit.script(model).save(folder / "net.script")
    torch.jit.trace(model, (IDS,), check_trace=False).save(folder / "net-traced.script")


def save_in_window(model, optimizer, folder):
    """What is written by a script that saves while gradients are under way."""
    folder.mkdir(parents=True)
    torch.save(model, folder / "model.pt")
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(copy.deepcopy(model).state_dict(), folder / "deep.pt")
    torch.save(list(copy.deepcopy(model).parameters()), folder / "deep-parameters.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def train(atoms, folder):
    """A half-precision loop that saves at every kind of moment; returns the model."""
    torch.manual_seed(0)
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    average = AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # which refuses half gradients
    with lasting(PlainView(model, optimizer, scaler), atoms):
        late = AveragedModel(model)
        for step in range(3):
            model(IDS).float().square().mean().backward()
            if step == 1:
                save_in_window(model, optimizer, folder / "window")
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            late.update_parameters(model)
        save_all(model, optimizer, late, folder / "between")
        torch.save(average, folder / "between" / "early.pt")
        save_graphs(model, folder / "between")
    return model


def found_by_a_stranger(folder):
    """What a process in which nanstop cannot be imported finds in a folder."""
    command = [sys.executable, scripts_own.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifacts")
    train((), folder / "plain")
    for name, atom in REMEDIES.items():
        train((atom,), folder / name)
    train(tuple(REMEDIES[name] for name in TOGETHER), folder / "together")
    found = found_by_a_stranger(folder)
    by_remedy = {}
    for path, description in found.items():
        remedy, _, rest = path.partition("/")
        by_remedy.setdefault(remedy, {})[rest] = description
    return by_remedy


def test_every_remedy_is_tried():
    assert {*REMEDIES, "attention"} == set(TABLE)


@pytest.mark.parametrize("remedy", [*REMEDIES, "together"])
def test_what_leaves_the_process_is_the_scripts_own(artifacts, remedy):
    plain = artifacts["plain"]
    assert not [found for found in plain.values() if isinstance(found, str)]
    assert artifacts[remedy].keys() == plain.keys()
    for name, expected in plain.items():
        assert artifacts[remedy][name] == expected, name


def held(atoms=(REMEDIES["fp32_trainables"],)):
    """A model and its optimizer between two steps under remedies, and the context that they are
    in.
    """
    torch.manual_seed(0)
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    return model, optimizer, lasting(PlainView(model, optimizer), atoms)


def step(model, optimizer):
    model(IDS).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded(model, value):
    model.load_state_dict({n: torch.full_like(t, value) for n, t in model.state_dict().items()})


def copied_into(model, value):
    for tensor in model.state_dict().values():
        tensor.fill_(value)


def through_data(model, value):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(value)


def new_data(model, value):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = torch.full_like(tensor.data, value)


@pytest.mark.parametrize("write", [loaded, copied_into, through_data, new_data])
@pytest.mark.parametrize("moment", ["before", "awake", "between"])
@pytest.mark.parametrize("name", ["fp32_trainables", "bf16"])
def test_what_the_script_writes_arrives(write, moment, name):
    model, optimizer, context = held((REMEDIES[name],))
    optimizer.param_groups[0]["lr"] = 1e-2  # which bfloat16 can hold
    with context:
        if moment != "before":
            step(model, optimizer)
        if moment == "awake":
            model(IDS)
        write(model, 0.5)
        with torch.no_grad():
            expected = copy.deepcopy(model).float()(IDS)
            assert torch.allclose(model(IDS).float(), expected, rtol=2e-2)
        step(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert not torch.equal(model.body.weight, torch.full_like(model.body.weight, 0.5))
    assert torch.allclose(model.body.weight, torch.full_like(model.body.weight, 0.5), atol=5e-2)


def test_float32_between_steps_is_kept_though_the_script_sees_half():
    """Updates that half precision cannot hold add up; what the script sees is their rounding."""
    model, optimizer, context = held()
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    start = model.body.weight.detach().clone()
    with context:
        for _ in range(20):
            step(model, optimizer)
            seen = model.body.weight.detach().clone()
            assert seen.dtype == torch.float16
        model(IDS)
        wide = model.body.weight.detach().clone()
    assert wide.dtype == torch.float32
    moved = (wide - start.float()).abs()
    assert 5e-6 < float(moved.max()) < 4e-5
    assert torch.equal(seen, wide.half())


def test_state_that_is_loaded_while_it_is_wide_is_widened_before_it_is_used():
    model, optimizer, context = held()
    with context:
        step(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        step(model, optimizer)
        formats = {t.dtype for entries in optimizer.state.values() for t in entries.values()}
        assert formats == {torch.float32}
        later = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        step(model, later)
        formats = {e["exp_avg"].dtype for e in later.state_dict()["state"].values()}
        assert formats == {torch.float16}
