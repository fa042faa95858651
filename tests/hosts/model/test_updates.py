"""What an update rests on, read off real trainers and loops:
restored state, hooks, sums over micro-batches, sinks.
"""

import shutil

import pytest
import torch
from torch import nn
from transformers import Trainer

import hf_cases
import nanstop
from nanstop.commands.check import job
from nanstop.commands.check.check import preflight
from nanstop.decide.policy import Policy
from nanstop.hosts.loop.watch import watch_loop
from nanstop.hosts.model.updates import (
    accumulation_of,
    resumed_from,
    resumed_state,
    seen_accumulation,
    sum_format,
)
from nanstop.hosts.script import autowatch
from nanstop.hosts.trainer.facts import facts_of
from nanstop.hosts.trainer.view import HfView
from nanstop.records import ResumeFacts
from nanstop.session.factory import opener
from nanstop.session.off import OffSession
from nanstop.store.incidents import Store

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def stepped(*, zero=False):
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(3):
        (layer(torch.ones(2, 4)).sum() * (0.0 if zero else 1.0)).backward()
        optimizer.step()
    return optimizer


def test_the_state_of_an_optimizer():
    assert resumed_state(None) is None
    assert resumed_state(torch.optim.AdamW(nn.Linear(2, 2).parameters())) is None
    assert resumed_state(stepped()).num_zero == 0
    found = resumed_state(stepped(zero=True))
    assert (found.step, found.num_moments, found.num_zero) == (3, 2, 2)


def test_an_optimizer_without_moments_is_no_loss():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert resumed_state(optimizer).num_moments == 0


def by_gradient(weight):
    """Update as LOMO does: no version moves."""
    weight.data -= 0.1 * weight.grad


def later(weight):
    if weight.grad is not None and float(weight.grad.norm()) >= 0.0:
        weight.norm_seen = float(weight.grad.norm())


@pytest.mark.parametrize(("hook", "told"), [(by_gradient, True), (later, False)])
@pytest.mark.parametrize("manual", [True, False])
def test_hooks_update_where_the_weights_move_not_where_there_is_one(tmp_path, hook, told, manual):
    torch.manual_seed(0)
    layer, said = nn.Linear(4, 4), []
    store = Store(tmp_path)
    opened = opener(Policy(), store, said.append)
    if not manual:
        autowatch.install(opened)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    layer.weight.register_post_accumulate_grad_hook(hook)
    watch = watch_loop(layer, optimizer, opened) if manual else None
    try:
        for _ in range(2):
            if watch is not None:
                watch.step(lambda batch: layer(batch["x"]).square().mean(), {"x": torch.ones(2, 4)})
                watch.update()
            else:
                layer(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        watch.close() if watch is not None else autowatch.unwatch()
    assert (["NS116"] if told else []) == [one.code for one in said if hasattr(one, "code")]
    assert len(layer.weight._post_accumulate_grad_hooks) == 1
    assert not layer.weight._backward_hooks


@pytest.mark.parametrize(("hook", "told"), [(by_gradient, True), (later, False)])
def test_hooks_of_a_trainers_model(tmp_path, hook, told):
    trainer = hf_cases.build("trainer", tmp_path, max_steps=2)
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    watch = nanstop.watch(trainer, out=tmp_path / "out", policy="observe")
    trainer.train()
    watch.close()
    assert ("NS116" in {finding.code for finding in watch.findings}) is told


class Renamed(torch.optim.Adam):
    """Keeps its moments under names of its own."""

    def step(self):
        super().step()
        for entry in self.state.values():
            entry["mean"], entry["power"] = entry.pop("exp_avg"), entry.pop("exp_avg_sq")


@pytest.mark.parametrize("zero", [True, False])
def test_moments_under_any_name(zero):
    layer = nn.Linear(4, 4)
    optimizer = Renamed(layer.parameters(), lr=1e-3)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for entry in optimizer.state.values() if zero else ():
        entry["mean"].zero_()
        entry["power"].zero_()
    assert resumed_state(optimizer) == ResumeFacts(step=1, num_moments=2, num_zero=2 * zero)


def test_labels_are_known_by_what_losses_ignore():
    ids = [torch.arange(12).reshape(2, 6) for _ in range(2)]
    targets = [torch.arange(12).reshape(2, 6) for _ in range(2)]
    targets[0][:, :5] = -100
    batches = [{"labels": i, "wanted": t} for i, t in zip(ids, targets, strict=True)]
    found = seen_accumulation([], batches, [2.0, 10.0])
    assert found is not None
    assert found.counts == (2, 10)


def test_batch_norms_that_train():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert accumulation_of(model).batch_norms == 1
    assert accumulation_of(model.eval()) is None


@pytest.mark.slow
def test_checkpoints_of_a_trainer(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    whole = tmp_path / "checkpoint-2"
    again = facts_of(HfView(trainer), trainer, resumed=str(whole)).resume
    assert (again.folder, again.step, again.missing) == ("checkpoint-2", 2, ())
    assert resumed_from(str(whole), None, scaled=True).missing == ("scaler.pt",)
    part = shutil.copytree(whole, tmp_path / "part")
    for name in ("optimizer.pt", "rng_state.pth"):
        (part / name).unlink()
    found = resumed_from(str(part), None, scaled=False)
    assert (found.step, found.missing) == (2, ("optimizer.pt", "rng_state.pth"))
    assert resumed_from(str(tmp_path / "nowhere"), None, scaled=False) is None


class Forgets(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return model(**inputs).loss


class Declares(Forgets):
    loss_is_scaled_for_ga = False


def checked(trainer):
    facts = facts_of(HfView(trainer), trainer)
    return preflight(job.look(facts, trainer=trainer))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "found"), [(Trainer, False), (Forgets, True), (Declares, False)])
def test_a_loss_that_is_divided_by_nothing(tmp_path, kind, found):
    trainer = hf_cases.build("trainer", tmp_path)
    trainer.__class__ = kind
    seen = checked(trainer)
    assert seen.facts.num_micro == 2
    assert ("NS117" in {finding.code for finding in seen.findings}) is found
    if found:
        title = next(f.title for f in seen.findings if f.code == "NS117")
        assert title == "gradients are 2 times too large"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "reward"])
def test_trainers_of_trl_add_up_as_they_should(tmp_path, kind):
    seen = checked(hf_cases.build(kind, tmp_path))
    codes = {finding.code for finding in seen.findings}
    assert not codes & {"NS112", "NS115", "NS116", "NS117"}


def test_the_format_that_gradients_were_summed_in():
    torch.manual_seed(0)
    parts = [torch.randn(4, 4).bfloat16() for _ in range(8)]
    exact = torch.stack([part.float() / 3 for part in parts]).sum(0)
    assert sum_format([exact]) is None
    assert sum_format([exact.bfloat16().float(), None]) == "bfloat16"
    assert sum_format([torch.zeros(4, 4)]) is None
    assert sum_format([]) is None


@pytest.mark.parametrize(
    ("answers", "losses", "by_tokens"),
    [
        ((3, 12), (2.0, 2.2), False),
        ((3, 12), (0.4, 1.6), True),
        ((3, 12), (0.4, 0.8), None),
        ((11, 12), (2.0, 2.2), None),
        ((0, 12), (2.0, 2.2), None),
        ((3, 12), (float("nan"), 2.2), None),
    ],
)
def test_how_a_loop_divides_its_losses_is_seen_in_them(answers, losses, by_tokens):
    labels = [torch.full((1, 16), -100) for _ in answers]
    for row, answer in zip(labels, answers, strict=True):
        row[0, 16 - answer :] = 5
    found = seen_accumulation((), [{"labels": row} for row in labels], losses)
    assert (found.by_tokens if found is not None else None) == by_tokens
    assert found is None or found.counts == answers


def test_labels_of_any_name_are_known_by_what_losses_ignore():
    ids, labels = torch.full((1, 16), 7), torch.full((1, 16), 5)
    short = labels.clone()
    short[0, :12] = -100
    batches = [{"ids": ids, "loss0": labels}, {"ids": ids, "answers": short}]
    assert seen_accumulation((), batches, (2.0, 2.2)).counts == (15, 4)
    assert seen_accumulation((), [{"ids": ids}, {"ids": ids}], (2.0, 2.2)) is None


@pytest.mark.parametrize(
    ("order", "sinks"),
    [("unscale clip", ("unscale", "clip")), ("clip", ("clip",)), ("", ("unscale",))],
)
def test_the_order_of_a_loops_sinks(order, sinks):
    seen = []

    def opened(_view, facts):
        seen.append(facts)
        return OffSession()

    autowatch.install(opened)
    try:
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        if "unscale" in order:
            scaler.unscale_(optimizer)
        if "clip" in order:
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
    finally:
        autowatch.unwatch()
    assert seen[0].scaler == 8.0
    assert seen[0].sinks == sinks[:1]
