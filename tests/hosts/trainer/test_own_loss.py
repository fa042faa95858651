"""What a loss function of the script's own reads inside a trainer is looked at without a second
call of it: its side effects happen once, and its weights are those of a plain run.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer

import nanstop
from hf_cases import build

torch.set_num_threads(1)
LOOKED_AT = ("NS114", "NS118", "NS208")


class Own(Trainer):
    """A language model's loss by hand; ``fault`` says what is wrong with it."""

    fault = ""
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        type(self).calls += 1
        ids = inputs["input_ids"]
        with torch.set_grad_enabled(self.fault != "without a graph"):
            states = model.model(ids).last_hidden_state
        logits, labels = model.lm_head(states), ids.masked_fill(inputs["labels"] < 0, -100)
        if self.fault != "not shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.fault == "probabilities":
            logits = logits.softmax(-1)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, logits) if return_outputs else loss


def trained(folder, fault, *, watched):
    torch.manual_seed(0)
    trainer = build("trainer", folder / "hf")
    trainer.__class__, Own.fault, Own.calls = Own, fault, 0
    trainer.args.max_steps = 12
    if not watched:
        trainer.train()
        return trainer, []
    with nanstop.watch(trainer, policy="observe", out=folder / "out") as watch:
        trainer.train()
    return trainer, [one for one in watch.findings if one.code in LOOKED_AT]


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("probabilities", "NS118", "softmax(-1)"),
        ("not shifted", "NS118", "cross_entropy"),
        ("without a graph", "NS114", "last_hidden_state"),
        ("", None, None),
    ],
)
def test_what_an_own_loss_reads(tmp_path, fault, code, text):
    trainer, findings = trained(tmp_path, fault, watched=True)
    assert [one.code for one in findings] == ([code] if code else [])
    assert all(any(text in line for line in one.lines) for one in findings)
    assert Own.calls == 12 * trainer.args.gradient_accumulation_steps


def test_an_own_loss_trains_as_without_nanstop(tmp_path):
    plain, _ = trained(tmp_path / "plain", "", watched=False)
    other, _ = trained(tmp_path / "watched", "", watched=True)
    pairs = zip(plain.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl


class Guarded(Trainer):
    """The mean over what a mask leaves of each row, and a guard against a row that has nothing."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        ids = inputs["input_ids"]
        logits = model.lm_head(model.model(ids).last_hidden_state)[:, :-1]
        each = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        mask = torch.ones_like(each).view_as(ids[:, 1:])
        if self.state.global_step == 2:
            mask[0] = 0.0
        loss = ((each.view_as(mask) * mask).sum(1) / mask.sum(1)).mean()
        if torch.isnan(loss):
            raise RuntimeError("the loss is NaN")
        return (loss, logits) if return_outputs else loss


@pytest.mark.parametrize("allow", [(), ("form",)])
def test_a_guard_of_the_loss_ends_a_run_unless_the_step_is_cured(tmp_path, allow):
    torch.manual_seed(0)
    trainer = build("trainer", tmp_path / "hf")
    trainer.__class__ = Guarded
    trainer.args.max_steps = 4
    policy = nanstop.Policy(allow=allow)
    ends = nullcontext() if allow else pytest.raises(RuntimeError, match="loss is NaN")
    with nanstop.watch(trainer, policy=policy, out=tmp_path / "out") as watch, ends:
        trainer.train()
    (report,) = watch.incidents
    assert (report.diagnoses[0].code, report.proof.verdict) == ("NS205", "proven")
    kinds = {entry.action.kind for entry in report.audit}  # both micro-batches of the window fail
    assert kinds == ({"redo", "adopt"} if allow else {"continue"})
    assert trainer.state.global_step == (4 if allow else 2)
