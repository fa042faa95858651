"""Whose a callback is: told by where its class lies, whatever its module is called."""

import sys
from types import ModuleType

import pytest
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback
from trl.trainer.callbacks import RichProgressCallback

import nanstop
from nanstop.hosts.trainer.callbacks import is_reporting, is_users


class Mine(TrainerCallback):
    pass


@pytest.fixture
def placed(tmp_path, monkeypatch):
    """Return a user's callback whose file has this name, as ``sys.path`` makes it possible."""

    def place(module, name="Mine"):
        known = ModuleType(module)
        known.__file__ = str(tmp_path / module.replace(".", "/")) + ".py"
        monkeypatch.setitem(sys.modules, module, known)
        return type(name, (TrainerCallback,), {"__module__": module})()

    return place


@pytest.mark.parametrize("module", ["trl.mine", "transformers.integrations.mine", "nanstop.mine"])
def test_a_users_callback_may_have_any_name(placed, module):
    assert is_users(placed(module))
    assert not is_reporting(placed(module))
    assert not is_reporting(placed(module, "RichProgressCallback"))


def test_callbacks_of_the_libraries_and_our_own():
    rich, board = (object.__new__(kind) for kind in (RichProgressCallback, TensorBoardCallback))
    for one in (rich, board, PrinterCallback(), nanstop.Callback()):
        assert not is_users(one)
    assert [is_reporting(one) for one in (rich, board, Mine(), nanstop.Callback())] == [
        *(True, True, False, False),
    ]
    assert is_users(Mine())
    assert is_users(EarlyStoppingCallback())
