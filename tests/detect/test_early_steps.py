"""What no failure shows: lost updates, flushed gradients, gradients that never arrive, the wrong
pooled token.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nanstop
from nanstop.decide.policy import Policy
from nanstop.detect.early_steps import EarlySteps
from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.view import PlainView
from nanstop.records import GradientPath, ParamGroup, RunFacts, Sighting
from nanstop.session.session import Session
from nanstop.store.incidents import Store
from noticed import noticed

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Layer(nn.Module):
    """A layer with weights like those of a pretrained model; counts its forwards."""

    def __init__(self, dtype=torch.float32, width=64):
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False, dtype=dtype)
        nn.init.normal_(self.inner.weight, std=0.02)
        self.num_forwards = 0

    def forward(self, x):
        self.num_forwards += 1
        return self.inner(x.to(self.inner.weight.dtype)).float()


def found(folder, model, optimizer, loss_fn, *, num_steps=4, rates=None, x=None):
    """Train watched and return {code: where} of the findings; there is no incident."""
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 64) if x is None else x}
    with nanstop.watch(model, optimizer, out=folder) as watch:
        for step in range(num_steps):
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[step]
            watch.step(loss_fn, batch)
            watch.update(clip=None)
    assert all(one.trains_nothing for one in watch.incidents)
    return {finding.code: finding for finding in noticed(watch.findings, watch.incidents)}


def quadratic(model):
    return lambda batch: model(batch["x"]).square().mean()


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def test_updates_that_are_rounded_away_are_measured_on_the_real_one(tmp_path):
    model = Layer(torch.bfloat16)
    findings = found(tmp_path, model, adamw(model, 1e-6), quadratic(model))
    assert findings["NS111"].confidence == "certain"
    assert "98 % of the weights" in findings["NS111"].cause
    assert findings["NS111"].where == "inner.weight"
    assert findings["NS111"].seen == Sighting(step=0, phase="optimizer")


@pytest.mark.parametrize(("dtype", "lr"), [(torch.bfloat16, 1e-3), (torch.float32, 1e-6)])
def test_updates_that_arrive_are_not_told(tmp_path, dtype, lr):
    model = Layer(dtype)
    assert "NS111" not in found(tmp_path, model, adamw(model, lr), quadratic(model))


def test_a_rate_that_rises_is_a_warm_up(tmp_path):
    torch.manual_seed(0)
    model = Layer(torch.float16)
    rates = [1e-9, 1e-8, 1e-7, 1e-6, 1e-3]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    assert not {"NS111"} & set(
        found(tmp_path, model, optimizer, quadratic(model), num_steps=5, rates=rates)
    )


def test_the_end_of_a_schedule_is_no_standstill(tmp_path):
    model = Layer(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    rates = [100.0, 100.0, 100.0, 1e-9, 1e-9]
    findings = found(tmp_path, model, optimizer, quadratic(model), num_steps=5, rates=rates)
    assert "NS111" not in findings


def test_stochastic_rounding_makes_good_what_one_update_loses(tmp_path):
    class Stochastic(torch.optim.SGD):
        bf16_stochastic_round = True

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.bf16_stochastic_round = True

    model = Layer(torch.bfloat16)
    optimizer = Stochastic(model.parameters(), lr=1e-6)
    assert "NS111" not in found(tmp_path, model, optimizer, quadratic(model))


def test_gradients_that_float16_flushes_are_compared_to_float32(tmp_path):
    model = Layer(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    findings = found(tmp_path, model, optimizer, lambda b: model(b["x"]).mean() * 1e-7)
    assert findings["NS303"].confidence == "certain"
    assert findings["NS303"].seen == Sighting(step=0, phase="backward")
    healthy = Layer(torch.float16)
    optimizer = torch.optim.SGD(healthy.parameters(), lr=1e-3)
    assert "NS303" not in found(tmp_path, healthy, optimizer, lambda b: healthy(b["x"]).mean() * 10)


@pytest.mark.parametrize(("size", "is_flushed"), [(1e-7, True), (1.0, False)])
def test_gradients_that_an_autocast_inside_of_the_model_flushes(tmp_path, size, is_flushed):
    class Inside(Layer):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float16):
                return super().forward(x)

    model = Inside()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    findings = found(tmp_path, model, optimizer, lambda b: model(b["x"]).mean() * size, num_steps=9)
    assert ("NS303" in findings) is is_flushed


def test_gradients_that_are_flushed_later_are_seen_from_the_first_of_the_two_windows_on(tmp_path):
    model = Layer(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss(batch):
        return model(batch["x"]).mean() * optimizer.param_groups[0]["lr"] * 1e3

    rates = [1e-2, 1e-2, 1e-9, 1e-9, 1e-9]
    findings = found(tmp_path, model, optimizer, loss, num_steps=5, rates=rates)
    assert findings["NS303"].seen == Sighting(step=2, phase="backward")


def test_zeros_that_float32_has_as_well_are_no_underflow(tmp_path):
    model = Layer(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    findings = found(tmp_path, model, optimizer, lambda b: model(b["x"])[:, :4].square().mean())
    assert "NS303" not in findings


class Blocks(nn.Module):
    """Blocks behind a frozen table, recomputed in the backward pass, and a trained head."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(16, 8).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=self.reentrant)
        return self.head(h.mean(1))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_get_no_gradient(tmp_path, reentrant):
    model = Blocks(reentrant=reentrant)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    target, ids = torch.tensor([0, 1]), torch.randint(16, (2, 6))
    findings = found(
        tmp_path, model, optimizer, lambda b: functional.cross_entropy(model(b["x"]), target), x=ids
    )
    assert ("NS114" in findings) == reentrant
    if reentrant:
        assert "8 of 10 trainable tensors" in findings["NS114"].cause
        assert findings["NS114"].seen == Sighting(step=2, phase="backward")


class LeavesOut(Blocks):
    """Leaves out its blocks in its first forward in training, as LayerDrop may."""

    num_forwards = 0

    def forward(self, ids):
        h = self.embed(ids)
        self.num_forwards += 1
        for block in self.blocks if self.num_forwards > 1 else ():
            h = h + block(h)
        return self.head(h.mean(1))


def test_layers_that_are_left_out_once_get_their_gradient_later(tmp_path):
    model = LeavesOut(reentrant=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    target, ids = torch.tensor([0, 1]), torch.randint(16, (2, 6))
    assert "NS114" not in found(
        tmp_path, model, optimizer, lambda b: functional.cross_entropy(model(b["x"]), target), x=ids
    )


def test_a_teacher_that_only_answers_is_not_missed(tmp_path):
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.Linear(64, 4)
            self.teacher = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))

        def forward(self, x):
            return self.student(x).sum(-1) - self.teacher(x).detach().sum(-1)

    model = Distilled()
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
    assert "NS114" not in found(tmp_path, model, optimizer, quadratic(model))


def test_an_optimizer_of_other_tensors_is_told_after_its_update(tmp_path):
    model = Layer()
    before = [p.detach().clone().requires_grad_() for p in model.parameters()]
    findings = found(tmp_path, model, torch.optim.SGD(before, lr=0.1), quadratic(model))
    assert findings["NS114"].title == "the optimizer holds nothing that is trained"
    assert findings["NS114"].seen == Sighting(step=0, phase="optimizer")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["kept elsewhere", "before the clip", "after the clip", "never"])
def test_copies_that_the_script_gives_the_gradients_are_no_finding(tmp_path, dtype, when):
    model = Layer(dtype)
    parameters = list(model.parameters())
    copies = [p.detach().float().clone().requires_grad_() for p in parameters]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    view = PlainView(model, optimizer)
    session = Session(
        policy=Policy(),
        store=Store(tmp_path),
        view=view,
        facts=facts_of_loop(view),
        announce=lambda _: None,
    )
    session.start()
    for index in range(2):
        quadratic(model)({"x": torch.randn(8, 64)}).backward()
        step = step_of(model, optimizer, {})
        if when == "after the clip":
            session.before_update(step)
        if when != "never":
            for copy, p in zip(copies, parameters, strict=True):
                copy.grad = p.grad.float()
        if when == "kept elsewhere":
            model.zero_grad()
        if when != "after the clip":
            session.before_update(step)
        optimizer.step()
        session.completed(index)
        model.zero_grad()
        optimizer.zero_grad()
    session.finish()
    expected = ["NS114"] if when == "never" and dtype is torch.float32 else []
    assert [one.code for one in noticed(session.findings, session.reports)] == expected


def test_a_loss_of_the_scripts_own_is_not_called_again(tmp_path):
    model, calls = Layer(), []
    loss_fn = quadratic(model)

    def counted(batch):
        calls.append(batch)
        return loss_fn(batch)

    found(tmp_path, model, adamw(model, 1e-3), counted, num_steps=9)
    assert len(calls) == 9


def test_half_precision_runs_a_few_micro_batches_again_and_then_no_more(tmp_path):
    model = Layer(torch.bfloat16)
    optimizer = adamw(model, 1e-3)
    looks = EarlySteps(nanstop_view(model, optimizer))
    facts = RunFacts(
        param_groups=(ParamGroup(dtype="bfloat16", trainable=True, num_tensors=1, num_elements=1),)
    )
    assert looks.due(0, facts)
    step = step_of(model, optimizer, {"x": torch.randn(8, 64)})
    looks.again(step, facts)
    assert model.num_forwards == 2
    assert not looks.due(1, facts)


def nanstop_view(model, optimizer):
    from fnstep import FnView

    return FnView(model, optimizer)


def step_of(model, optimizer, batch):
    from fnstep import FnStep

    return FnStep(model, lambda m, b: m(b["x"]).square().mean(), [batch], optimizer)


def test_several_ranks_and_hidden_updates_are_left_alone():
    model = Layer(torch.bfloat16)
    optimizer = adamw(model, 1e-3)
    looks = EarlySteps(nanstop_view(model, optimizer))
    step = step_of(model, optimizer, {"x": torch.randn(8, 64)})
    path = GradientPath(num_trainable=1, num_tensors=1)
    for facts in (RunFacts(world_size=2), RunFacts(veto="inside backward")):
        given = RunFacts(world_size=facts.world_size, veto=facts.veto, gradient_path=path)
        assert looks.arrival.arrived(given, step) is None
        assert not looks.due(0, given)


class Seeing(nn.Module):
    """A layer for text, and more of the model than that for images."""

    def __init__(self, *, blocked):
        super().__init__()
        self.text, self.blocked = Layer(), blocked
        self.images = nn.ModuleDict(
            {"patches": nn.Linear(8, 64), "blocks": nn.Sequential(Layer(), Layer())}
        )

    def forward(self, x):
        if not self.blocked:
            return self.text(x)
        with torch.no_grad():
            seen = self.images["blocks"](self.images["patches"](x[:, :8]))
        return self.text(x) + seen


@pytest.mark.parametrize("blocked", [False, True])
def test_modules_that_are_not_called_need_no_gradient(tmp_path, blocked):
    model = Seeing(blocked=blocked)
    findings = found(tmp_path, model, adamw(model, 1e-3), quadratic(model))
    assert findings.keys() == ({"NS114"} if blocked else set())


def scored(pad, folder, num_steps=2):
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=pad,
        num_labels=2,
    )
    model = Qwen2ForSequenceClassification(config)
    ids, mask = torch.randint(8, 32, (4, 6)), torch.ones(4, 6, dtype=torch.long)
    ids[1:, 4:], mask[1:, 4:] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0, 1])}
    optimizer = adamw(model, 1e-3)
    with nanstop.watch(model, optimizer, out=folder) as watch:
        for _ in range(num_steps):
            watch.step(lambda b: model(**b).loss, batch)
            watch.update(clip=None)
    return {finding.code: (finding.title, finding.cause) for finding in watch.findings}


def test_a_score_that_is_read_at_padding_is_told_in_float32_too(tmp_path):
    title, cause = scored(5, tmp_path / "bad")["NS208"]
    assert (title, cause) == (
        "scores read at padding",
        "3 rows of the batch scored at a padding token",
    )
    assert scored(0, tmp_path / "good") == {}


@pytest.mark.parametrize(("stale", "share"), [(True, 1.4), (False, 0.0)])
def test_copies_of_other_weights_are_seen_when_they_are_written_back(stale, share):
    torch.manual_seed(0)
    model, other = Layer(), Layer()
    masters = [p.detach().clone() for p in (other if stale else model).parameters()]
    view = PlainView(model, torch.optim.SGD(masters, lr=1e-3))
    looks = EarlySteps(view)
    assert looks.arrival.replaced(view) == 0.0
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)
    assert looks.arrival.replaced(view) == pytest.approx(share, abs=0.1)
    assert looks.arrival.replaced(view) == 0.0


def test_weights_that_the_optimizer_holds_are_not_compared():
    model = Layer()
    view = PlainView(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    looks = EarlySteps(view)
    assert looks.arrival.replaced(view) == 0.0
    nn.init.normal_(model.inner.weight)
    assert looks.arrival.replaced(view) == 0.0
