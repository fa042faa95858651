"""Updates of half weights are judged before they are applied:
with every kernel, under a trainer and in loops.
"""

import copy

import pytest
import torch
from torch import nn

import nanstop
import tiny
from e2e.scripts import HEAD
from loop_scripts import investigated, run_script, same
from nanstop.hosts.loop.function_micro import FunctionMicro

KERNELS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
STEPS, LR = 6, 1e-4


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def llama(dtype):
    return tiny.llama(vocab_size=256, hidden_size=64, intermediate_size=128).to(dtype)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 256, (4, 16), generator=generator) for _ in range(STEPS)]


def language_loss(model, batch):
    return model(input_ids=batch, labels=batch).loss


def loop(model, optimizer, watch=None):
    """Train as a script would; return what it sees of its losses."""
    losses = []
    for batch in batches():
        if watch is not None:
            losses.append(float(watch.step(lambda b: language_loss(model, b), batch)))
            watch.update()
            continue
        loss = language_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def watched_loop(tmp_path, dtype, optimizer=torch.optim.AdamW, policy=None, **options):
    model = llama(dtype)
    made = optimizer(model.parameters(), **({"lr": LR} | options))
    with nanstop.watch(model, made, policy=policy, out=tmp_path / "ns") as watch:
        losses = loop(model, made, watch)
    return model, losses, watch


def plain_loop(dtype, optimizer=torch.optim.AdamW, **options):
    model = llama(dtype)
    return model, loop(model, optimizer(model.parameters(), **({"lr": LR} | options)))


FIRST = {"fused": "NS110", "foreach": "NS402", "single": "NS402"}
"""A fused kernel loses second moments, any other its eps as well: the update is not finite then."""


@pytest.fixture(scope="module")
def in_float32():
    return plain_loop(torch.float32)


@pytest.mark.parametrize("kernel", ["fused", slow("foreach"), slow("single")])
def test_a_loop_in_float16_trains_as_in_float32(tmp_path, kernel, in_float32):
    model, losses, watch = watched_loop(tmp_path, torch.float16, **KERNELS[kernel])
    (report,) = watch.incidents
    codes = [diagnosis.code for diagnosis in report.diagnoses]
    assert codes[0] == FIRST[kernel]
    assert {"NS402", "NS102"} <= {*codes}
    assert report.incident.phase == "optimizer"
    assert report.proof.verdict == "proven"
    assert [atom.remedy for atom in report.proof.minimal] == ["fp32_trainables"]
    assert [entry.action.kind for entry in report.audit] == ["rollback"]
    assert losses == pytest.approx(in_float32[1], rel=2e-3)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    for mine, true in zip(model.parameters(), in_float32[0].parameters(), strict=True):
        assert (mine - true).detach().abs().max() < 10 * LR


class Attends(nn.Module):
    """Attention whose keys have a bias, as BERT's: no softmax depends on it, so that its gradient
    is rounding alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.query = nn.Embedding(256, 32), nn.Linear(32, 32)
        self.key, self.value, self.head = (nn.Linear(32, n) for n in (32, 32, 256))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, batch):
        x = self.table(batch)
        weights = (self.query(x) @ self.key(x).mT).softmax(-1)
        return nn.functional.cross_entropy(
            self.head(weights @ self.value(x)).flatten(0, 1).float(), batch.flatten()
        )


def test_a_gradient_of_rounding_alone_keeps_no_cure_from_being_proven(tmp_path):
    model = Attends().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    with nanstop.watch(model, optimizer, out=tmp_path / "ns") as watch:
        for batch in batches():
            watch.step(model, batch)
            watch.update(clip=1.0)
    (report,) = watch.incidents
    assert report.diagnoses[0].code == "NS110"
    assert report.proof.verdict == "proven"
    assert [entry.action.kind for entry in report.audit] == ["rollback"]


def test_the_same_loop_unwatched_is_ruined(in_float32):
    model, _ = plain_loop(torch.float16, fused=True)
    pairs = zip(model.parameters(), in_float32[0].parameters(), strict=True)
    assert max(float((mine - true).detach().abs().max()) for mine, true in pairs) > 1.0


def test_the_fused_kernel_is_not_said_to_divide_by_zero(tmp_path):
    _, _, watch = watched_loop(tmp_path, torch.float16, fused=True)
    (report,) = watch.incidents
    best, update = report.diagnoses[:2]
    assert report.localization.key.kind == "length"
    assert (best.code, best.confidence) == ("NS110", "certain")
    assert "are 0 in float16 and not in float32" in best.cause
    assert "far too far" in update.title
    assert "those of gradients below 0.0055 are 0" in update.cause
    assert any("float32 moves it by" in line for line in update.lines)
    told = [f.cause for f in watch.findings if f.code in ("NS102", "NS110")]
    assert told
    assert not any("divide by zero" in cause or "rounds to 0" in cause for cause in told)


@pytest.mark.parametrize("kernel", ["fused", slow("foreach")])
def test_observing_changes_nothing(tmp_path, kernel):
    plain, losses = plain_loop(torch.float16, **KERNELS[kernel])
    observe = nanstop.Policy(on_failure="observe")
    model, seen, watch = watched_loop(tmp_path, torch.float16, policy=observe, **KERNELS[kernel])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    assert str(seen) == str(losses)
    assert {report.diagnoses[0].code for report in watch.incidents} == {FIRST[kernel]}
    assert {entry.action.kind for r in watch.incidents for entry in r.audit} == {"observe"}


@pytest.mark.parametrize("kernel", ["fused", slow("foreach")])
def test_leaving_out_leaves_the_weights_alone_and_then_stops(tmp_path, kernel):
    model = llama(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **KERNELS[kernel])
    skip = nanstop.Policy(on_failure="skip", max_skips_in_a_row=3)
    with (
        pytest.raises(nanstop.TrainingStopped, match="training stopped"),
        nanstop.watch(model, optimizer, policy=skip, out=tmp_path) as watch,
    ):
        loop(model, optimizer, watch)
    (report,) = watch.incidents
    assert [entry.action.kind for entry in report.audit] == ["skip", "skip", "skip", "stop"]
    start = llama(torch.float16)
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), start.parameters(), strict=True)
    )
    assert moved <= (4 * LR if kernel == "fused" else 0.0)


def test_stopping_stops_before_the_weights_are_ruined(tmp_path):
    model = llama(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    stop = nanstop.Policy(on_failure="stop")
    with (
        pytest.raises(nanstop.NanstopError, match="training stopped"),
        nanstop.watch(model, optimizer, policy=stop, out=tmp_path) as watch,
    ):
        loop(model, optimizer, watch)
    assert same(list(model.parameters()), list(llama(torch.float16).parameters()))


HEALTHY = {
    "bf16 fused": (torch.bfloat16, torch.optim.AdamW, {"fused": True}),
    "bf16": (torch.bfloat16, torch.optim.AdamW, {}),
    "fp16 sgd": (torch.float16, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "fp16 large eps": (torch.float16, torch.optim.AdamW, {"eps": 1e-3, "fused": True}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_half_weights_are_left_alone(tmp_path, name):
    dtype, optimizer, options = HEALTHY[name]
    plain, losses = plain_loop(dtype, optimizer, **options)
    model, seen, watch = watched_loop(tmp_path, dtype, optimizer, **options)
    assert not watch.incidents
    assert seen == losses
    assert same(list(model.parameters()), list(plain.parameters()))


def train(tmp_path, dtype, optim, *, watched, policy=None, steps=STEPS, **settings):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    args = tiny.training_args(tmp_path / "out", max_steps=steps, **settings) | {
        "optim": optim,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
    }
    model = llama(dtype)
    trainer = Trainer(model, TrainingArguments(**args), train_dataset=tiny.TokenRows())
    watch = nanstop.watch(trainer, policy=policy, out=tmp_path / "ns") if watched else None
    trainer.train()
    return model, [row["loss"] for row in trainer.state.log_history if "loss" in row], watch


@pytest.mark.parametrize("optim", ["adamw_torch_fused", slow("adamw_torch")])
def test_a_trainer_in_float16_trains_as_in_float32(tmp_path, optim):
    _, true, _ = train(tmp_path / "32", torch.float32, optim, watched=False)
    model, losses, watch = train(tmp_path, torch.float16, optim, watched=True)
    (report,) = watch.incidents
    assert report.diagnoses[0].code == FIRST["fused" if "fused" in optim else "foreach"]
    assert report.proof.verdict == "proven"
    assert [entry.action.kind for entry in report.audit] == ["rollback"]
    assert losses == pytest.approx(true, rel=2e-3)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.slow
def test_a_trainer_whose_only_update_is_bad_loses_none(tmp_path):
    true, _, _ = train(tmp_path / "32", torch.float32, "adamw_torch", watched=False, steps=1)
    model, _, watch = train(tmp_path, torch.float16, "adamw_torch", watched=True, steps=1)
    (report,) = watch.incidents
    assert report.audit[-1].action.kind == "rollback"
    start = llama(torch.float16)
    for mine, wide, old in zip(
        model.parameters(), true.parameters(), start.parameters(), strict=True
    ):
        if (
            mine.dim() > 1
        ):  # an update of 1e-4 is lost where a weight is 1, when it is stored in float16 again
            assert (mine.float() - wide).norm() < 0.2 * (wide - old.float()).norm()


@pytest.mark.slow
def test_a_trainer_that_leaves_updates_out_stops_with_the_weights_it_had(tmp_path):
    skip = nanstop.Policy(on_failure="skip", max_skips_in_a_row=3, on_stop="end")
    model, _, watch = train(tmp_path, torch.float16, "adamw_torch", watched=True, policy=skip)
    (report,) = watch.incidents
    assert [entry.action.kind for entry in report.audit] == ["skip", "skip", "skip", "stop"]
    assert same(list(model.parameters()), list(llama(torch.float16).parameters()))


def test_a_window_that_cannot_be_run_again_is_left_out(tmp_path, monkeypatch):
    """Its rehearsal is not finite on the very numbers that the update would use."""
    monkeypatch.setattr(FunctionMicro, "obstacle", lambda _: "the test says so")
    model = llama(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    before = copy.deepcopy(model)
    with nanstop.watch(model, optimizer, out=tmp_path) as watch:
        for batch in batches()[:2]:
            watch.step(lambda b: language_loss(model, b), batch)
            watch.update()
    (report,) = watch.incidents
    assert report.diagnoses[0].code == "NS402"
    assert {entry.action.kind for entry in report.audit} == {"skip"}
    assert same(list(model.parameters()), list(before.parameters()))


HEAD_IN_HALF = """
body, head = nn.Linear(6, 8), nn.Linear(8, 1).half()
body.requires_grad_(False)
optimizer = torch.optim.AdamW(head.parameters(), lr=3e-4, eps=1e-6)
losses = []
for step in range(4):
    for part in range(PARTS):
        x = torch.randn(8, 6)
        pooled = body(x).to(head.weight.dtype)
        loss = (head(pooled).float().squeeze(-1) - x[:, 0]).square().mean() * 1e-3
        (loss / PARTS).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""


@pytest.mark.parametrize("parts", [1, 3])
def test_a_head_in_half_behind_a_cast_is_judged_in_windows_too(tmp_path, parts):
    source = HEAD + HEAD_IN_HALF
    true = run_script(tmp_path / "true.py", source.replace(".half()", ""), PARTS=parts)["losses"]
    found, news = investigated(tmp_path / "half.py", source, on_failure="repair", PARTS=parts)
    (report,) = (one for one in news if hasattr(one, "diagnoses"))
    assert (report.diagnoses[0].code, report.proof.verdict) == ("NS110", "proven")
    assert [entry.action.kind for entry in report.audit] == ["rollback"]
    assert found["losses"] == pytest.approx(true, rel=2e-2)
