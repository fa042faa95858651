"""The public functions: what they take, what they refuse, and the kill switch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanstop
import tiny
from nanstop.records.codec import to_json

torch.set_num_threads(1)


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def loss_fn_of(model):
    return lambda batch: F.mse_loss(model(batch["x"]), batch["y"])


def batches(bad: int | None = None):
    generator = torch.Generator().manual_seed(0)
    for index in range(4):
        x = torch.randn(8, 4, generator=generator)
        if index == bad:
            x[2, 1] = float("nan")
        yield {"x": x, "y": x.sum(1, keepdim=True).nan_to_num()}


def train(model, optimizer, *, bad=None, **options):
    with nanstop.watch(model, optimizer, **options) as watch:
        for batch in batches(bad):
            watch.step(loss_fn_of(model), batch)
            watch.update(clip=1.0)
    return watch


def test_a_bad_batch_is_named_and_left_out(tmp_path):
    model, optimizer = parts()
    watch = train(model, optimizer, bad=2, out=tmp_path)
    (report,) = watch.incidents
    assert report.diagnoses[0].code == "NS501"
    assert report.localization.culprit == "batch[x]"
    assert report.incident.at.step == 2
    assert report.audit[-1].action.kind == "skip"
    assert all(p.isfinite().all() for p in model.parameters())
    assert "NS501" in str(watch.report())
    assert "NS501" in watch._repr_html_()
    loaded = nanstop.load(tmp_path / report.incident.id)
    assert to_json(loaded) == to_json(report.incident)
    where = "in forward, step 2, micro-batch 0, rank 0>"
    assert repr(loaded) == f"<incident {loaded.id}: loss nan {where}"
    assert repr(watch).startswith("<LoopWatch: 4 steps, 1 incident, 0 findings, in ")
    assert repr(watch.report()).endswith(" s: 4 steps, 1 incident, 0 findings>")
    assert nanstop.investigate(tmp_path / report.incident.id).diagnoses[0].code == "NS501"


def test_a_sample_is_quarantined_where_that_is_allowed(tmp_path):
    model, optimizer = parts()
    policy = nanstop.Policy(allow=("drop_sample",))
    (report,) = train(model, optimizer, bad=2, out=tmp_path, policy=policy).incidents
    assert report.proof.verdict == "isolated"
    assert [str(atom) for atom in report.proof.minimal] == ["drop_sample(0:2)"]
    assert report.audit[-1].action.kind == "quarantine"


def test_healthy_run_is_bitwise_the_plain_one(tmp_path):
    model, optimizer = parts()
    assert train(model, optimizer, out=tmp_path).incidents == ()
    plain, plain_optimizer = parts()
    for batch in batches():
        loss_fn_of(plain)(batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_kill_switch_trains_unwatched(tmp_path, monkeypatch):
    monkeypatch.setenv("NANSTOP", "off")
    model, optimizer = parts()
    watch = train(model, optimizer, bad=2, out=tmp_path / "none")
    assert watch.incidents == ()
    assert "no incident" in str(watch.report())
    assert not (tmp_path / "none").exists()
    assert not all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((object(),), "watch\\(\\) takes a transformers or TRL trainer"),
        ((nn.Linear(2, 2),), "needs the optimizer too"),
        ((nn.Linear(2, 2), "adamw"), "torch optimizer"),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments, message):
    with pytest.raises(nanstop.NanstopError, match=message):
        nanstop.watch(*arguments)


@pytest.mark.parametrize("policy", ["repiar", 3])
def test_policy_is_checked(policy):
    with pytest.raises(nanstop.NanstopError, match="NS001"):
        nanstop.watch(*parts(), policy=policy)


def test_check_speaks_before_a_step_is_run():
    codes = {finding.code for finding in nanstop.check(tiny.llama().half())}
    assert "NS102" in codes
    assert nanstop.check(tiny.llama()) == ()
