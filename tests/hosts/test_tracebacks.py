"""A script's own exception passes through unchanged, and pytest shows its reader no frame of
nanstop.
"""

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import nanstop
import tiny
from loop_scripts import ReplayingSession, run_script
from nanstop.errors import NanstopError
from nanstop.hosts.model.view import PlainView
from nanstop.records import Atom
from nanstop.remedies.apply import applied

OURS = Path(nanstop.__file__).parent


class TheirError(ValueError):
    """Of the script."""


CAUSE = KeyError("their cause")


def fails(*_args, **_kwargs):
    raise TheirError("theirs", 7) from CAUSE


def in_a_trainer(tmp_path):
    class Failing(Trainer):
        compute_loss = fails

    args = TrainingArguments(**tiny.training_args(tmp_path, max_steps=1))
    trainer = Failing(model=tiny.llama(), args=args, train_dataset=tiny.TokenRows())
    nanstop.watch(trainer, out=tmp_path)
    return trainer.train


def in_a_loop(tmp_path):
    net = torch.nn.Linear(2, 1)
    watch = nanstop.watch(net, torch.optim.SGD(net.parameters(), lr=0.1), out=tmp_path)
    return lambda: watch.step(fails, torch.ones(1, 2))


def under_a_remedy(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].forward = fails

    def call():
        with applied(PlainView(net), [Atom(remedy="island", target="1", value="float32")]):
            net(torch.ones(1, 2))

    return call


SCRIPT = """
import torch

net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    if step == 2:
        net[1].register_forward_hook(fails)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def in_a_script(tmp_path):
    return lambda: run_script(tmp_path / "train.py", SCRIPT, ReplayingSession(), fails=fails)


@pytest.mark.parametrize("place", [in_a_trainer, in_a_loop, in_a_script, under_a_remedy])
def test_the_exception_is_theirs_and_the_frames_between_are_hidden(tmp_path, place):
    call = place(tmp_path)
    with pytest.raises(TheirError, match="theirs") as caught:
        call()
    assert caught.value.args == ("theirs", 7)
    assert caught.value.__cause__ is CAUSE
    assert any(OURS in Path(entry.path).parents for entry in caught.traceback)
    shown = caught.traceback.filter(caught)
    assert not [entry for entry in shown if OURS in Path(entry.path).parents]
    assert shown[-1].name == "fails"


@pytest.mark.parametrize("place", ["before", "behind"])
def test_what_torch_refuses_is_shown_without_frames_of_nanstop(tmp_path, place):
    refused = "torch.ones(2) @ torch.ones(3)"
    source = SCRIPT.replace("net[1].register_forward_hook(fails)", refused)
    if place == "behind":
        source = SCRIPT.replace("if step == 2:", "if False:").replace(
            ".sum().backward()", ".sum().mul(1 if step < 2 else torch.ones(3) @ torch.ones(2))"
        )
    with pytest.raises(RuntimeError, match="inconsistent tensor size") as caught:
        run_script(tmp_path / "train.py", source, ReplayingSession())
    assert any(OURS in Path(entry.path).parents for entry in caught.traceback)
    shown = caught.traceback.filter(caught)
    assert not [entry for entry in shown if OURS in Path(entry.path).parents]


def test_frames_of_an_error_of_nanstop_are_shown():
    net = torch.nn.Linear(2, 1)
    watch = nanstop.watch(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(NanstopError, match="without step") as caught:
        watch.update()
    assert OURS in Path(caught.traceback.filter(caught)[-1].path).parents
