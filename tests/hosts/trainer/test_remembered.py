"""What a trainer of the script's own remembers outside of its attributes is what it was before the
step when that is run again, and what the run has left when it goes on.
"""

import pytest
import torch
from transformers import Trainer

import nanstop
from hf_cases import build

torch.set_num_threads(1)
PASSED, COUNTED = [], 0


class Counts:
    def __init__(self):
        self.calls = 0


class OfItsClass(Trainer):
    passed = []  # noqa: RUF012
    num = Counts()

    def so_far(self):
        self.passed.append(0)
        self.num.calls += 1
        return len(self.passed)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss / (self.so_far() - 3)


class OfItsFile(OfItsClass):
    def so_far(self):
        PASSED.append(0)
        return len(PASSED)


class ByNumber(OfItsClass):
    def so_far(self):
        global COUNTED
        COUNTED += 1
        return COUNTED


def test_what_a_class_holds_is_as_it_was(tmp_path):
    fails_again(tmp_path, OfItsClass)
    assert (len(OfItsClass.passed), OfItsClass.num.calls) == (6, 6)


@pytest.mark.parametrize(("kind", "left"), [(OfItsFile, "PASSED"), (ByNumber, "COUNTED")])
def test_what_a_file_holds_is_as_it_was(tmp_path, kind, left):
    fails_again(tmp_path, kind)
    found = globals()[left]
    assert (len(found) if isinstance(found, list) else found) == 6


def fails_again(folder, kind):
    torch.manual_seed(0)
    trainer = build("trainer", folder / "hf")
    trainer.__class__ = kind
    trainer.args.max_steps, trainer.args.gradient_accumulation_steps = 6, 1
    with nanstop.watch(trainer, out=folder / "out") as watch:
        trainer.train()
    (incident,) = watch.incidents
    assert incident.diagnoses[0].code == "NS204"
    assert incident.replay.fidelity in ("bitwise", "same_failure")
