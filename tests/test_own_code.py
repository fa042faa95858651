"""Code is told apart by where packages really lie, never by what a folder is called."""

import importlib
import importlib.metadata
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import nanstop.demo.scenarios
import nanstop.faults.forward
import nanstop.hosts.tape.tape
import nanstop.tracing.places
from fnstep import FnStep
from nanstop.own_code import is_library, is_own, is_wrapper, lies_in
from nanstop.tracing.record_step import record
from nanstop.tracing.recorder import Recorder

HOSTILE = ("nanstop/train.py", "a b/accelerate/train.py", "南停/torch/transformers/utils/x.py")


@pytest.mark.parametrize("name", [*HOSTILE, "site-packages/mine/train.py"])
def test_a_users_folder_may_have_any_name(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    for place in (str(file), os.path.relpath(file), name):
        assert [is_own(place), is_wrapper(place), is_library(place)] == [False] * 3


def test_a_folder_beside_a_package_that_begins_as_it_does_is_another():
    package = Path(torch.__file__).parent
    assert lies_in(str(package / "nn" / "x.py"), "torch")
    assert not lies_in(str(package.with_name("torch_mine") / "x.py"), "torch")


def test_all_of_nanstop_is_its_own_but_what_uses_it():
    for module in (nanstop, nanstop.hosts.tape.tape, nanstop.tracing.places):
        assert is_own(module.__file__)
        assert is_wrapper(module.__file__)
    for module in (nanstop.faults.forward, nanstop.demo.scenarios):
        assert not is_wrapper(module.__file__)
    assert not is_own(__file__)


def test_libraries_are_those_of_python_and_of_the_machine():
    from torch.nn.modules import linear

    assert is_wrapper(linear.__file__)
    for module in (os, linear, pytest):
        assert is_library(module.__file__)
    assert is_library("<frozen importlib._bootstrap>")
    assert not is_library("<string>")


def test_generated_code_lies_nowhere(monkeypatch):
    monkeypatch.chdir(Path(torch.__file__).parent)
    assert not is_wrapper("<string>")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Has a package imported from a folder of the test:
    ``stand_in(name, folder)`` returns its file.
    """
    names = []

    def make(name, folder):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(folder))
        for known in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        names.append(name)
        return importlib.import_module(name).__file__

    yield make
    for name in names:
        sys.modules.pop(name, None)


def test_a_users_own_package_that_is_called_as_a_library_is_the_users(stand_in, tmp_path):
    file = stand_in("accelerate", tmp_path / "project")
    assert not is_wrapper(file)


def test_an_editable_library_lies_outside_of_the_installed_ones(stand_in, tmp_path, monkeypatch):
    checkout = tmp_path / "a b" / "checkout"
    installed = tmp_path / "lib" / "accelerate-99.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 99\n")
    url = checkout.as_uri()
    (installed / "direct_url.json").write_text(
        f'{{"url": "{url}", "dir_info": {{"editable": true}}}}'
    )
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    file = stand_in("accelerate", checkout / "src")
    assert importlib.metadata.version("accelerate") == "99"
    assert is_wrapper(file)


def test_a_link_to_a_package_is_the_package(tmp_path):
    (tmp_path / "elsewhere").symlink_to(Path(torch.__file__).parent)
    assert is_wrapper(str(tmp_path / "elsewhere" / "_tensor.py"))


def test_a_package_in_an_archive_has_a_place(tmp_path, monkeypatch):
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("packed_here/__init__.py", "def f(): pass")
    monkeypatch.syspath_prepend(str(archive))
    module = importlib.import_module("packed_here")
    try:
        assert lies_in(module.f.__code__.co_filename, "packed_here")
    finally:
        del sys.modules["packed_here"]


def test_what_entered_the_recorder_asked_for_none_of_its_ops():
    """Ops of a run that nanstop began have no line of its callers;
    a script that records by itself has its own.
    """
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    batches = [{"x": torch.ones(2, 4)}]
    step = FnStep(net, lambda model, batch: model(batch["x"]).sum(), batches, optimizer)
    step.update = optimizer.step
    assert {op.line for op in record(step, 0, update=True).trace.ops} == {None}
    with Recorder(net, {}) as recorder:
        torch.ones(3).add(1)
    assert {op.line[0].co_filename for op in recorder.finish().ops} == {__file__}
