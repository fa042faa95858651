"""The session on real steps: every branch from a failure to what the adapter is told to do."""

from __future__ import annotations

import json
import random
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.decide.decision import STOPPED
from nanstop.decide.policy import Policy
from nanstop.detect.signals import Alarm
from nanstop.records import Atom, GradientPath, HeadFacts, RunFacts, Sighting, Signal, StepId
from nanstop.report.text.run_end import end_line
from nanstop.session import looks
from nanstop.session.failing import investigation, proving
from nanstop.session.failing.failures import Failures
from nanstop.session.failing.investigation import Investigation
from nanstop.session.history import History
from nanstop.session.machine import environment
from nanstop.session.session import Session
from nanstop.session.telling.live import Live
from nanstop.store.incidents import Store, load_report


class Product(nn.Module):
    """A product that leaves float16 where ``x`` is large, and fits float32 easily."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 4)
        self.down = nn.Linear(4, 1)

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * gate * 1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Product()

    def forward(self, x):
        return self.mlp(x)


def half_loss(model, batch):
    return model(batch["x"].half()).float().square().mean()


def rows(*scales):
    torch.manual_seed(1)
    return {"x": torch.rand(len(scales), 4) * torch.tensor(scales)[:, None]}


def half_step(*batches, index=0):
    model = Net().half()
    step = FnStep(model, half_loss, batches, torch.optim.SGD(model.parameters(), lr=1e-3))
    step.id, step.facts = StepId(run="test", step=index), facts_of(model)
    return with_losses(step)


def facts_of(model, trainable=True):
    from nanstop.records import ParamGroup

    kind = str(next(model.parameters()).dtype).removeprefix("torch.")
    group = ParamGroup(dtype=kind, trainable=trainable, num_tensors=4, num_elements=25)
    return RunFacts(host="loop", param_groups=(group,))


def data_step(*batches, index=0, loss=None):
    """Rows that are not finite in float32: nothing but leaving them out can help."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    def mean(model, batch):
        return model(batch["x"]).square().mean()

    step = FnStep(model, loss or mean, batches, torch.optim.SGD(model.parameters(), lr=1e-3))
    step.id, step.facts = StepId(run="test", step=index), facts_of(model)
    return with_losses(step)


def with_losses(step):
    """Run the window once as a host would, and note the losses."""
    with step.isolated():
        step.losses = tuple(first_loss(step, micro) for micro in range(len(step.batches)))
    return step


def first_loss(step, micro):
    try:
        return step.run(micro)
    except IndexError:
        return None


def bad_row(count, *bad):
    torch.manual_seed(2)
    x = torch.rand(count, 4)
    x[list(bad), 2] = float("nan")
    return {"x": x}


def session_for(step, folder, *, clock=time.monotonic, **policy):
    news = []
    session = Session(
        policy=Policy(**policy),
        store=Store(folder),
        view=step.view,
        facts=step.facts,
        announce=news.append,
        clock=clock,
    )
    session.news = news
    session.start()
    return session


def fail(session, step, *, rewind=None, **details):
    signal = Signal(source="loss", value=float("nan"), at=replace(step.id, micro=0))
    return session.failed(step, alarm(signal, **details), rewind=rewind)


def alarm(signal, *, phase="forward", **details):
    return Alarm((signal,), phase, **details)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def weights(step):
    return [p.detach().clone() for p in step.view.root.parameters()]


GOOD, LARGE = rows(1.0, 2.0), rows(1500.0, 1.0)


def test_a_first_failure_is_redone_under_a_proven_island_on_its_micro_batch_only(tmp_path):
    step = half_step(GOOD, LARGE, index=3)
    session, before = session_for(step, tmp_path), weights(step)
    decision = fail(session, step)
    assert decision.kind == "redo"
    assert set(decision.atoms) == {1}
    assert {atom.remedy for atom in decision.atoms[1]} <= {"island", "outer_autocast"}
    (report,) = session.reports
    assert report.diagnoses[0].code == "NS201"
    assert report.incident.at == StepId(run="test", step=3, micro=1)
    assert all(map(torch.equal, before, weights(step)))
    assert all(p.grad is None for p in step.view.root.parameters())
    assert report.failures == ()


def test_what_became_of_a_decision_stands_in_the_report_that_is_kept(tmp_path):
    step = half_step(LARGE, index=3)
    session = session_for(step, tmp_path)
    decision = fail(session, step)
    session.carried_out(decision, "done", before="nan", after="0.5")
    (entry,) = session.reports[0].audit
    assert (entry.outcome, entry.before, entry.after) == ("done", "nan", "0.5")
    assert load_report(tmp_path / decision.incident).audit == (entry,)


def test_a_run_that_had_something_to_say_leaves_a_page_and_a_healthy_one_none(tmp_path):
    step = half_step(LARGE, index=3)
    healthy = data_step({"x": torch.ones(2, 4)}, index=3)
    for name, of, fails in (
        ("healthy", healthy, False),
        ("found", step, False),
        ("failing", step, True),
    ):
        session = session_for(of, tmp_path / name)
        if fails:
            fail(session, step)
        session.finish()
    assert [one.name for one in (tmp_path / "healthy").iterdir()] == ["summary.json"]
    assert "warning[NS102]" in (tmp_path / "found" / "report.html").read_text()
    page = (tmp_path / "failing" / "report.html").read_text()
    assert "error[NS201]" in page
    assert "by exponent" in page


def test_an_investigation_has_no_effect_and_its_records_get_their_id_at_the_end(tmp_path):
    step = half_step(LARGE, index=3)
    run = SimpleNamespace(
        policy=Policy(),
        view=step.view,
        facts=step.facts,
        environment=environment(),
        series=History(),
        metrics=History(),
        live=Live(tmp_path, []),
        in_force=(),
    )
    signal = Signal(source="loss", value=float("nan"), at=step.id)
    end = Failures(run).met(step, alarm(signal), rewind=None, can_skip=True)
    assert list(tmp_path.iterdir()) == []
    assert (end.is_new, end.action.kind, end.action.proof) == (True, "redo", "")
    report = end.named("0007", tmp_path / "0007").report
    ids = [report.incident.id, report.replay.incident, report.proof.incident]
    assert [*ids, report.audit[0].incident, report.audit[0].action.proof] == ["0007"] * 5


def test_the_second_failure_of_a_kind_is_folded_and_its_remedy_adopted_until_the_end(tmp_path):
    step = half_step(GOOD, LARGE, index=3)
    session = session_for(step, tmp_path)
    fail(session, step)
    session.completed(3)
    again = half_step(LARGE, index=4)
    again.view = step.view
    decision = fail(session, again)
    assert (decision.kind, decision.atoms) == ("redo", {})
    (report,) = session.reports
    assert (report.count, report.audit[-1].action.kind) == (2, "adopt")
    with again.isolated():
        assert again.run(0).isfinite()
    session.finish()
    with again.isolated():
        assert not again.run(0).isfinite()
    assert summary(tmp_path)["exit"] == 0


def test_a_remedy_is_adopted_anew_in_a_second_training(tmp_path):
    step = half_step(LARGE)
    session = session_for(step, tmp_path)
    fail(session, step)
    session.finish()
    session.start()
    assert summary(tmp_path)["exit"] is None
    assert fail(session, step).kind == "redo"
    with step.isolated():
        assert step.run(0).isfinite()
    session.finish()
    assert session.reports[0].count == 2


class Flaky(nn.Module):
    """A product that is spoilt in 65 of 100 runs, by what no replay puts back."""

    def __init__(self, seed):
        super().__init__()
        self.mlp, self.draw = Product(), random.Random(seed)

    def forward(self, x):
        return self.mlp(x) * (float("nan") if self.draw.random() < 0.65 else 1.0)


def test_nothing_is_proven_about_what_comes_and_goes(tmp_path):
    codes = []
    for seed in range(20):
        model = Flaky(seed).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = FnStep(model, half_loss, [rows(1.0, 2.0)], optimizer)
        step.facts, step.losses = facts_of(model), (torch.tensor(float("nan")),)
        session = session_for(step, tmp_path / str(seed))
        resolution = fail(session, step)
        (report,) = session.reports
        assert resolution.adopt == () == sum(resolution.atoms.values(), ())
        assert report.proof is None or report.proof.verdict == "none_found"
        codes.append(report.diagnoses[0].code)
    assert (
        codes.count("NS603") >= 17
    )  # in the others, nearly every run of the step as it is has failed


def test_a_failure_without_an_allowed_remedy_is_skipped_folded_and_at_last_stops(tmp_path):
    session = session_for(data_step(bad_row(2, 0)), tmp_path, max_skips_in_a_row=3)
    kinds = [fail(session, data_step(bad_row(2, 0), index=i)).kind for i in range(5)]
    assert kinds == ["skip", "skip", "skip", "stop", "stop"]
    (row,) = summary(tmp_path)["incidents"]
    assert (row["code"], row["count"], row["action"]) == ("NS501", 5, "stop")
    reasons = {entry.action.reason for entry in session.reports[0].audit[:3]}
    waits = 'leaving it out would change what is trained, and waits to be allowed: "drop_sample"'
    assert reasons == {waits}


def test_an_update_that_was_applied_ends_the_row_of_skips(tmp_path):
    session = session_for(data_step(bad_row(2, 0)), tmp_path)
    for index in range(0, 12, 2):
        assert fail(session, data_step(bad_row(2, 0), index=index)).kind == "skip"
        session.completed(index + 1)
    session.finish()  # and the look at a step that was to come


def test_every_micro_batch_loses_its_own_bad_samples_and_the_next_window_its_own(tmp_path):
    session = session_for(data_step(bad_row(3)), tmp_path, allow=("drop_sample",))
    first = fail(session, data_step(bad_row(3, 1), bad_row(3), bad_row(4, 0, 3)))
    assert first.kind == "redo"
    assert first.atoms == {0: dropped("0:1"), 2: dropped("2:0", "2:3")}
    second = fail(session, data_step(bad_row(3), bad_row(3, 2), index=1))
    assert second.atoms == {1: dropped("1:2")}
    (report,) = session.reports
    assert report.count == 2
    assert [entry.action.kind for entry in report.audit] == ["quarantine", "quarantine"]
    assert session.finish() is None


def dropped(*targets):
    return tuple(Atom(remedy="drop_sample", target=target) for target in targets)


def test_micro_batches_that_are_wholly_bad_are_left_out(tmp_path):
    step = data_step(bad_row(2, 0, 1), bad_row(1, 0), bad_row(2))
    session = session_for(step, tmp_path, allow=("drop_micro",))
    decision = fail(session, step)
    assert decision.atoms == {
        micro: (Atom(remedy="drop_micro", target=str(micro)),) for micro in (0, 1)
    }


def test_samples_that_raise_by_themselves_are_left_out(tmp_path):
    def look_up(model, batch):
        return model(torch.eye(4)[batch["ids"]]).square().mean()

    step = data_step({"ids": torch.tensor([[1, 2], [3, 9]])}, loss=look_up)
    assert step.losses == (None,)
    session = session_for(step, tmp_path, allow=("drop_sample",))
    signal = Signal(source="exception", name="IndexError", message="index 9 is out of bounds")
    error = IndexError("index 9 is out of bounds")
    decision = session.failed(step, alarm(signal, error=error))
    assert decision.atoms == {0: dropped("0:1")}
    assert session.reports[0].diagnoses[0].code == "NS502"


@pytest.mark.parametrize(
    ("word", "kind"), [("skip", "skip"), ("stop", "stop"), ("observe", "proceed")]
)
def test_the_words_of_the_policy(tmp_path, word, kind):
    step = half_step(LARGE)
    session = session_for(step, tmp_path, on_failure=word)
    assert fail(session, step).kind == kind
    assert session.reports[0].proof.verdict == "proven"


def test_weights_that_an_observed_failure_broke_are_its_consequence_and_no_new_incident(tmp_path):
    step = data_step(bad_row(2, 0), index=4)
    session = session_for(step, tmp_path, on_failure="observe")
    fail(session, step)
    session.completed(4)
    with torch.no_grad():
        step.view.root.weight.fill_(float("nan"))
    for index in (5, 6):
        later = data_step(bad_row(2), index=index)
        assert fail(session, later, bad_params=("weight",)).kind == "proceed"
        session.completed(index)
    at_end = Signal(source="param", name="weight", at=StepId(run="test", step=7))
    session.failed(None, alarm(at_end, phase="optimizer", bad_params=("weight",)))
    (report,) = session.reports
    assert report.count == 3
    assert [entry.at.step for entry in report.audit] == [4, 5, 6]


def test_weights_that_are_bad_at_the_end_without_a_cause_are_an_incident_of_their_own(tmp_path):
    step = data_step(bad_row(2))
    session = session_for(step, tmp_path)
    signal = Signal(source="param", name="weight", at=StepId(run="test", step=7))
    decision = session.failed(None, alarm(signal, phase="optimizer", bad_params=("weight",)))
    assert decision.kind == "proceed"
    (report,) = session.reports
    assert (report.diagnoses[0].code, report.incident.at.step) == ("NS401", 7)
    assert "no step" in report.audit[0].action.reason


def test_an_update_can_be_left_out_where_nothing_can_be_run_again(tmp_path):
    session = session_for(data_step(bad_row(2)), tmp_path)
    for index in (3, 5):
        signal = Signal(source="loss", value=float("nan"), at=StepId(run="test", step=index))
        assert session.failed(None, alarm(signal), can_skip=True).kind == "skip"
        session.completed(index + 1)
    (report,) = session.reports
    assert (report.count, report.incident.at.step) == (2, 3)
    assert [entry.at.step for entry in report.audit] == [3, 5]
    session.finish()


def test_an_evaluation_is_observed_and_folded_without_another_proof(tmp_path):
    session = session_for(data_step(bad_row(2, 0)), tmp_path)
    for index in (2, 4):
        step = data_step(bad_row(2, 0), index=index)
        assert fail(session, step, phase="evaluate").kind == "proceed"
    (report,) = session.reports
    assert (report.count, report.incident.phase) == (2, "evaluate")
    assert report.audit[0].action.kind == "observe"


class Updating(FnStep):
    """Its updates stay, unless the isolation is asked to undo them too."""

    @contextmanager
    def isolated(self, *, with_update=False):
        with super().isolated(with_update=with_update):
            yield
            present = [p.detach().clone() for p in self.view.root.parameters()]
        if not with_update:
            with torch.no_grad():
                for p, now in zip(self.view.root.parameters(), present, strict=True):
                    p.copy_(now)


class ScriptedRewind:
    """Windows that can be run from the weights as they are now."""

    def __init__(self, *steps) -> None:
        self.steps = steps
        self.kept = [(p, p.detach().clone()) for p in steps[0].view.root.parameters()]

    @contextmanager
    def rewound(self):
        present = [p.detach().clone() for p, _ in self.kept]
        with torch.no_grad():
            for p, kept in self.kept:
                p.copy_(kept)
        try:
            yield
        finally:
            with torch.no_grad():
                for (p, _), now in zip(self.kept, present, strict=True):
                    p.copy_(now)


@pytest.mark.parametrize("unfrozen_later", [False, True])
def test_an_update_that_broke_the_weights_is_found_cured_and_rolled_back(tmp_path, unfrozen_later):
    """AdamW in float16: its eps of 1e-8 is 0 there."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    # A column of zeros has no gradient: 0 / (sqrt(0) + 0).
    batch = {"x": torch.rand(2, 4).half() * torch.tensor([1, 1, 0, 1])}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    step = Updating(model, loss, (batch,), optimizer)
    step.facts = facts_of(model, trainable=not unfrozen_later)
    with_losses(step)
    rewind = ScriptedRewind(step)
    model.zero_grad()
    step.run(0)
    step.update()
    optimizer.state.clear()
    assert not model.weight.isfinite().all()
    now = FnStep(model, loss, (batch,), optimizer)
    now.id, now.facts = StepId(run="test", step=1), step.facts
    with_losses(now)
    session = session_for(now, tmp_path)
    decision = fail(session, now, rewind=rewind, bad_params=("weight",))
    (report,) = session.reports
    assert report.diagnoses[0].code == "NS402"
    assert report.incident.at.step == 0
    assert decision.kind == "rollback"
    assert [atom.remedy for atom in decision.adopt] == ["fp32_trainables"]
    assert decision.atoms == {}
    assert not model.weight.isfinite().all()


STAGES = [
    "batch_facts",
    "rerun",
    "localize",
    "of_unwritten",
    "environment",
    "prove_step",
    "examine",
]


def module_of(stage):
    """The module that calls a stage."""
    return proving if hasattr(proving, stage) else investigation


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_is_a_line_of_the_report_and_the_run_goes_on(
    tmp_path, monkeypatch, stage
):
    def broken(*_args, **_details):
        raise MemoryError("no room for it")

    step = half_step(GOOD, LARGE, index=3)
    session, before = session_for(step, tmp_path), weights(step)
    monkeypatch.setattr(module_of(stage), stage, broken)
    decision = fail(session, step)
    assert decision.kind in ("redo", "skip")
    (report,) = session.reports
    assert any("no room for it" in line for line in report.failures)
    assert all(map(torch.equal, before, weights(step)))
    assert len(summary(tmp_path)["incidents"]) == 1


def test_a_case_that_cannot_be_made_is_skipped(tmp_path):
    class Unrunnable(FnStep):
        def isolated(self, *, with_update=False):
            raise RuntimeError("out of memory")

    step = half_step(LARGE)
    step.__class__ = Unrunnable
    session = session_for(step, tmp_path)
    assert fail(session, step).kind == "skip"
    assert "out of memory" in " ".join(session.reports[0].failures)


@pytest.mark.parametrize("stage", ["rerun", "localize", "of_unwritten", "prove_step"])
def test_an_interrupt_keeps_the_incident_and_the_weights(tmp_path, monkeypatch, stage):
    module, step = module_of(stage), half_step(GOOD, LARGE)
    original = getattr(module, stage)
    session, before = session_for(step, tmp_path), weights(step)

    def interrupted(*args, **details):
        with step.isolated():
            step.run(0)
            raise KeyboardInterrupt

    monkeypatch.setattr(module, stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fail(session, step)
    (report,) = session.reports
    assert report.audit[0].action.reason == "the investigation was interrupted"
    assert (tmp_path / report.incident.id / "report.json").is_file()
    assert all(map(torch.equal, before, weights(step)))
    monkeypatch.setattr(module, stage, original)
    session.finish(1)
    assert summary(tmp_path)["exit"] == 1


def test_several_processes_only_observe(tmp_path):
    step = half_step(LARGE)
    step.facts = replace(step.facts, world_size=2)
    session = session_for(step, tmp_path)
    assert fail(session, step).kind == "proceed"
    assert session.reports[0].audit[0].action.kind == "observe"


def test_the_gauge_finds_overflow_that_was_absorbed_and_takes_its_share_of_time_only(tmp_path):
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True)) * self.scale

    model = Norm().half()
    step = FnStep(model, half_loss, (rows(1000.0, 1000.0),))
    step.facts = facts_of(model)
    ticks = iter(range(100))
    session = session_for(step, tmp_path, clock=lambda: float(next(ticks)))
    assert session.gauge_due(0)
    session.gauge(step)
    assert [finding.code for finding in session.findings if finding.code == "NS209"] == ["NS209"]
    assert not session.gauge_due(1)
    found = {row["code"]: row for row in summary(tmp_path)["findings"]}["NS209"]
    assert (found["step"], found["micro"], found["phase"]) == (step.id.step, 0, "forward")
    assert found["op"].startswith("aten.mul")
    assert (
        "return x * torch.rsqrt((x * x).mean(-1, keepdim=True)) * self.scale" in found["lines"][0]
    )


def test_a_look_that_needs_room_is_a_small_share_of_the_run(tmp_path, monkeypatch):
    now = [0.0]

    @contextmanager
    def made(_step):
        now[0] += 10.0
        yield 1

    step = half_step(GOOD, index=0)
    session = session_for(step, tmp_path, clock=lambda: now[0])
    monkeypatch.setattr(looks, "room_made", made)
    assert session.gauge_due(1)
    session.gauge(step)
    for seconds, is_due in ((10.0, False), (3000.0, False), (3000.0, True)):
        now[0] += seconds
        assert session.gauge_due(2) == is_due


def test_a_finding_that_was_measured_comes_before_one_that_was_expected(tmp_path):
    step = half_step(GOOD, index=3)
    step.facts = replace(step.facts, model_type="t5", autocast="float16")
    session = session_for(step, tmp_path)
    assert "NS101" in {finding.code for finding in session.findings}
    path = GradientPath(num_trainable=8, num_tensors=4, num_reached=1)
    session.learned(at=step.id, gradient_path=path)
    first = session.findings[0]
    assert (first.code, first.confidence) == ("NS114", "likely")
    assert first.seen == Sighting(step=3, phase="backward")
    rows = summary(tmp_path)["findings"]
    assert [row["code"] for row in rows] == [finding.code for finding in session.findings]
    assert [row["step"] for row in rows] == [3] + [None] * (len(rows) - 1)


def test_gradients_that_a_scaler_refuses_are_seen_in_the_step_that_the_host_is_in(tmp_path):
    step = half_step(GOOD)
    session = session_for(step, tmp_path)
    session.present = lambda: StepId(run="test", step=7)
    assert {one.code: one.seen for one in session.findings}["NS102"] is None
    session.learned(scaler=65536.0)
    assert {one.code: one.seen for one in session.findings}["NS102"] is None
    session.learned(param_groups=step.facts.param_groups)
    seen = {one.code: one.seen for one in session.findings}["NS102"]
    assert seen == Sighting(step=7, phase="optimizer")
    assert session.findings[0].code == "NS102"
    session.present = lambda: StepId(run="test", step=9)
    session.learned(param_groups=step.facts.param_groups)
    assert [one.seen for one in session.findings if one.code == "NS102"] == [seen]


@pytest.mark.parametrize(
    ("message", "confidence", "seen"),
    [
        (
            "Cannot handle batch sizes > 1 if no padding token is defined.",
            "certain",
            Sighting(step=4, micro=1, phase="forward"),
        ),
        ("No such file", "likely", None),
    ],
)
def test_what_the_run_refuses_by_itself_is_certain(tmp_path, message, confidence, seen):
    step = half_step(GOOD)
    head = HeadFacts(module="score", trained=True, pads=False)
    step.facts = replace(step.facts, head=head, batch_shape=(2, 8))
    session = session_for(step, tmp_path)
    session.raised(StepId(run="test", step=4, micro=1), ValueError(message))
    (found,) = [one for one in session.findings if one.code == "NS109"]
    assert (found.confidence, found.seen) == (confidence, seen)
    assert [r["step"] for r in summary(tmp_path)["findings"] if r["code"] == "NS109"] == [
        seen.step if seen else None
    ]


def test_a_gauge_that_cannot_run_is_said_and_no_more(tmp_path):
    class Unrunnable(FnStep):
        def isolated(self, *, with_update=False):
            raise RuntimeError("out of memory")

    step = half_step(GOOD)
    step.__class__ = Unrunnable
    session = session_for(step, tmp_path)
    session.gauge(step)
    assert any("out of memory" in str(one) for one in session.news)
    assert session.reports == []


@pytest.mark.parametrize(("kind", "told"), [(torch.bfloat16, []), (torch.float16, ["NS102"])])
def test_what_a_run_shows_by_itself_is_not_told_before(tmp_path, kind, told):
    step = half_step(rows(1.0))
    step.view.root.to(kind)
    step.facts = facts_of(step.view.root)
    session = session_for(step, tmp_path)
    assert [finding.code for finding in session.findings] == told


def test_of_a_long_row_of_failures_ever_fewer_are_looked_into(tmp_path, monkeypatch):
    looked = []
    look = Investigation.look
    monkeypatch.setattr(
        Investigation,
        "look",
        lambda self, failing: looked.append(self.at.step) or look(self, failing),
    )
    session = session_for(data_step(bad_row(2, 0)), tmp_path)
    kinds = [fail(session, data_step(bad_row(2, 0), index=i)).kind for i in range(33)]
    assert kinds == ["skip"] * 32 + ["stop"]
    assert looked == [0, 1, 2, 3, 4, 8, 16, 32]
    (report,) = session.reports
    assert report.count == 33
    reasons = {entry.action.reason for entry in report.audit[:32]}
    waits = 'leaving it out would change what is trained, and waits to be allowed: "drop_sample"'
    assert reasons == {waits}


def test_what_was_lost_in_an_earlier_training_does_not_stop_the_next(tmp_path):
    session = session_for(data_step(bad_row(2, 0)), tmp_path, max_skips_in_a_row=2)
    for _ in range(2):
        kinds = [fail(session, data_step(bad_row(2, 0), index=i)).kind for i in range(3)]
        assert kinds == ["skip", "skip", "stop"]
        session.finish(STOPPED)
        assert (summary(tmp_path)["ended"], summary(tmp_path)["exit"]) == ("stopped", 3)
        session.start()
        assert summary(tmp_path)["ended"] is None


def test_updates_that_were_left_out_are_steps_of_the_run_and_are_told_at_its_end(tmp_path):
    session = session_for(data_step(bad_row(2, 0)), tmp_path)
    session.completed(0)
    assert fail(session, data_step(bad_row(2, 0), index=1)).kind == "skip"
    session.left_out(1)
    session.finish()
    assert summary(tmp_path)["steps"] == 2
    skipped = "1 of 2 updates skipped (they trained nothing)"
    start = f"2 steps watched, 1 incident (NS501), {skipped}; details: `nanstop report "
    assert end_line(session.news[-1]).startswith(start)
