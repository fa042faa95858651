"""What a cure is held against is the same function: its draws, its choices, all of its modules."""

import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import tiny
from fnstep import FnStep
from nanstop.decide.policy import Policy
from nanstop.localize.localize import localize
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.forms.evidence import is_better_computed
from nanstop.prove.prove import prove_step
from nanstop.prove.reference import exact
from nanstop.prove.reference.exact import ExactRuns
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from nanstop.remedies.forms import bounds
from nanstop.replay.rerun import Attempt


def proof_of(model, loss, batches, *candidates, micros=(0,)):
    torch.manual_seed(0)
    step = FnStep(model, loss, batches)
    failing = FailingStep(step=step, micro=micros[0], micros=micros)
    place = localize(step, micros[0])
    assert place is not None
    return prove_step(failing, place.key, candidates, policy=Policy(), in_float64=place.in_float64)


def island(target, value="float32->input"):
    return (Atom(remedy="island", target=target, value=value),)


def squashed(net, batch):
    scores = net(batch["x"]) + 0.01 * torch.randn_like(batch["x"])
    return torch.log(1 - torch.tanh(scores) ** 2).mean()


@pytest.mark.parametrize("size", [12.0, 17.6])
@pytest.mark.parametrize("value", ["log_space", "guarded"])
def test_a_form_may_keep_digits_that_float64_loses(size, value):
    """Of 1 - tanh(17.6)^2 float64 has two digits: what it gives is near, and no measure."""
    torch.manual_seed(0)
    step = FnStep(nn.Linear(1, 1, bias=False), squashed, [{"x": torch.full((5, 1), size)}])
    with torch.no_grad():
        step.view.root.weight.fill_(1.0)
    failing = FailingStep(step=step, micro=0, micros=(0,))
    runs = ExactRuns(failing)
    assert (runs.of(0).failed, runs.dtype) == (False, torch.float64)
    line = squashed.__code__.co_firstlineno + 2
    remedy = "stable_form" if value == "log_space" else "form"
    atoms = (Atom(remedy=remedy, target=f"{__file__}:{line}", value=value),)
    run = runs.attempt(0, under=partial(applied, step.view, atoms))
    assert not run.failed
    assert is_better_computed(failing, runs, atoms, run) == (value == "log_space")
    gap = abs(run.loss / runs.of(0).loss - 1)
    assert value == "guarded" or (gap > 1e-4) == (size > 17)


def decayed(net, batch):
    steps = net(batch["x"]).squeeze(-1).cumsum(0)
    later = torch.ones(len(steps), len(steps)).tril()
    decay = torch.exp(steps[:, None] - steps[None]) * later
    return (decay @ batch["x"]).square().mean()


@pytest.mark.parametrize("bound", [20.0, -1.0])
def test_a_bound_on_what_is_left_out_is_the_same_function(bound, monkeypatch):
    """What a mask hides behind an exponential may be any number; what it lets through may not."""
    monkeypatch.setattr(bounds, "most_exponent", lambda _: bound)
    torch.manual_seed(0)
    step = FnStep(nn.Linear(1, 1, bias=False), decayed, [{"x": torch.rand(64, 1) + 0.5}])
    with torch.no_grad():
        step.view.root.weight.fill_(-2.0)
    failing = FailingStep(step=step, micro=0, micros=(0,))
    runs = ExactRuns(failing)
    assert (runs.of(0).failed, runs.dtype) == (False, torch.float64)
    target = f"{__file__}:{decayed.__code__.co_firstlineno + 3}"
    atoms = (Atom(remedy="form", target=target, value="bounded"),)
    run = runs.attempt(0, under=partial(applied, step.view, atoms))
    assert not run.failed
    assert is_better_computed(failing, runs, atoms, run) == (bound > 0)


class Overflowing(nn.Module):
    """Gives numbers beyond float16 that the layer after it brings back."""

    def __init__(self, width, given):
        super().__init__()
        self.out = nn.Linear(width, given)

    def forward(self, x):
        return self.out(x * 1e5) * 1e-5


class Noisy(nn.Module):
    """Adds noise, which torch draws otherwise in each format."""

    def forward(self, x):
        return x + 4.0 * torch.rand_like(x)


@pytest.mark.parametrize("drawing", [nn.Dropout(0.0), nn.Dropout(0.4), Noisy()])
def test_what_is_drawn_at_random_is_the_same_in_float32(drawing):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), drawing, Overflowing(16, 16)).half()
    batch = {"x": torch.randn(256, 16).half(), "sign": torch.randn(256, 16).sign()}

    def loss(net, given):
        return (net(given["x"]).float() * given["sign"]).mean()

    proof = proof_of(model, loss, [batch], island("2"))
    assert proof.verdict == "proven", proof.next_experiment
    assert proof.reference.num_draws == (getattr(drawing, "p", 1) > 0)


def mixture():
    """A Mixtral in float16 whose experts come in pairs that its routers can hardly tell apart, and
    whose logits leave float16.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    small = tiny.llama().config.to_dict() | {"num_local_experts": 4, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**small, num_experts_per_tok=1))
    with torch.no_grad():
        for layer in model.model.layers:
            routed = "mlp" if hasattr(layer, "mlp") else "block_sparse_moe"
            gate = getattr(layer, routed).gate.weight
            gate[1::2] = gate[0::2] * (1.0 + 1e-4 * torch.randn(2, gate.shape[1]))
        model.lm_head = Overflowing(32, 64)
    return model.half()


def test_an_island_is_not_refused_because_float32_routes_elsewhere():
    model = mixture()
    ids = torch.randint(2, 64, (2, 16), generator=torch.Generator().manual_seed(1))

    def loss(net, batch):
        return net(input_ids=batch["ids"], labels=batch["ids"]).loss

    proof = proof_of(model, loss, [{"ids": ids}], island("lm_head"))
    assert proof.verdict == "proven", proof.next_experiment
    assert proof.reference.num_choices >= 2


class Guarded(nn.Module):
    """Leaves out rows whose score is not above a threshold that float16 cannot tell it from."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        nn.init.ones_(self.score.weight)

    def forward(self, x):
        kept = (self.score(x) > 4.0).to(x.dtype)
        return self.scale * (kept * x).sum() / kept.sum()


def test_a_choice_that_is_the_failure_is_not_taken_over():
    batch = {"x": torch.full((3, 4), 1.0004)}
    proof = proof_of(
        Guarded().half(), lambda net, b: net(b["x"].to(net.score.weight.dtype)), [batch]
    )
    assert proof.reference.outcome == "pass"
    assert proof.reference.num_choices == 0


class Casting(nn.Module):
    """A float32 model that computes under an autocast of its own, partly outside any module."""

    def __init__(self):
        super().__init__()
        self.table = nn.Linear(256, 256)
        self.last = Overflowing(256, 256)
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.last(self.table(x) @ self.weight)


def outside(net, batch):
    """The same in ``compute_loss``: it is the caller who casts."""
    with torch.autocast("cpu", dtype=torch.float16):
        return net[1](net[0](batch["x"])).float().square().mean()


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_autocast_inside_has_its_own_tolerance_and_is_off_in_float32(where):
    torch.manual_seed(0)
    if where == "forward":
        model, target, loss = Casting(), "last", lambda m, b: m(b["x"]).float().square().mean()
    else:
        model = nn.Sequential(nn.Linear(256, 256), Overflowing(256, 256))
        target, loss = "1", outside
    proof = proof_of(model, loss, [{"x": torch.randn(8, 256)}], island(target, "float32"))
    assert proof.verdict == "proven", proof.next_experiment
    assert proof.reference.loss_tolerance == pytest.approx(8 * torch.finfo(torch.float16).eps)


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.last = Overflowing(16, 16)

    def forward(self, x):
        return self.last(self.body(x))


def test_a_teacher_beside_the_model_is_in_float32_and_can_be_cured():
    torch.manual_seed(0)
    student, teacher = nn.Linear(16, 16), Teacher().half().requires_grad_(False)
    before = [p.clone() for p in teacher.parameters()]

    def loss(net, batch):
        with torch.no_grad():
            wanted = teacher(batch["x"].half()).float()
        return (net(batch["x"]) - wanted).square().mean()

    batch = {"x": torch.randn(8, 16)}
    proof = proof_of(student, loss, [batch], island("Teacher.last"))
    assert proof.reference.outcome == "pass"
    assert proof.verdict == "proven", proof.next_experiment
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))
    assert {p.dtype for p in teacher.parameters()} == {torch.float16}


def test_a_float32_run_that_is_none_is_no_verdict_on_formats():
    """Tensors in half precision that nothing in float32 meets."""
    torch.manual_seed(0)
    student, weight = nn.Linear(16, 16), torch.randn(16, 16).half()

    def loss(net, batch):
        wanted = (weight * 1e5).float().mean()
        return (net(batch["x"]) - wanted).square().mean()

    proof = proof_of(student, loss, [{"x": torch.randn(8, 16)}], island("", "float32"))
    assert proof.verdict == "none_found"
    assert proof.reference.still_in == "float16"
    assert "cast to float16 by the script itself" in proof.next_experiment


def test_casts_of_the_script_are_left_out_where_only_they_fail():
    """Weights that belong to no module, as a loop's own functions have them."""
    torch.manual_seed(0)
    student, weight = nn.Linear(16, 16), torch.randn(16, 16).half()

    def loss(net, batch):
        wanted = (batch["x"].half() @ weight * 1e5).float()
        return (net(batch["x"]) * 1e5 - wanted).square().mean()

    proof = proof_of(student, loss, [{"x": torch.randn(8, 16)}], island("", "float32"))
    assert (proof.reference.outcome, proof.reference.still_in) == ("pass", "")
    assert proof.reference.loss > 1e10
    assert proof.verdict == "none_found"


@pytest.mark.parametrize("constant", [torch.float32, torch.float64])
def test_a_step_that_refuses_float64_does_not_fail_in_it(constant):
    torch.manual_seed(0)
    ones = torch.ones(16, dtype=constant)

    def loss(net, batch):
        out = net(batch["x"])
        return (out / ((out * 0) @ ones)[:, None]).sum()

    net = nn.Linear(16, 16).to(constant)
    proof = proof_of(net, loss, [{"x": torch.randn(4, 16, dtype=constant)}])
    refuses = constant == torch.float32
    assert proof.reference.fails_in == (("float32",) if refuses else ("float32", "float64"))
    assert ("no number format" in proof.next_experiment) != refuses


@pytest.mark.parametrize(("argument", "is_seen"), [(200.0, False), (1000.0, True)])
def test_an_operation_that_float64_did_not_come_to_does_not_fail_in_it(argument, is_seen):
    """A tensor of the script stays float32 beside a model in float64."""
    torch.manual_seed(0)
    returns = torch.tensor([0.5, argument, 0.1, 0.2])

    def loss(net, batch):
        return (net(batch["x"]).square().mean(1) * returns.exp()).mean()

    proof = proof_of(nn.Linear(16, 16), loss, [{"x": torch.randn(4, 16)}])
    assert proof.reference.fails_in == (("float32", "float64") if is_seen else ("float32",))
    assert ("no number format" in proof.next_experiment) == is_seen


def test_a_cast_of_the_script_to_float32_is_none_in_float64():
    """No row is healthy: nothing but the exact run tells whether a form is the same function."""
    torch.manual_seed(0)
    line = inspect.getsourcelines(surprise)[1] + 2

    def loss(net, batch):
        scores = net(batch["x"]).float()
        return surprise(torch.zeros(4, 16).index_add(0, torch.arange(4), scores))

    batch = {"x": 200.0 * torch.randn(4, 16)}
    form = Atom(remedy="stable_form", target=f"{__file__}:{line}", value="log_space")
    proof = proof_of(nn.Linear(16, 16), loss, [batch], (form,))
    assert (proof.reference.outcome, proof.reference.dtype) == ("pass", "float64")
    assert proof.verdict == "proven", proof.next_experiment


def surprise(scores):
    shares = scores.softmax(-1)
    return -shares.log().mean()


def test_a_sample_that_float64_holds_too_is_left_out_as_the_others_were():
    """Its numbers are no measure of what is left without it."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 16)}
    batch["x"][1] *= 1e20

    def loss(net, given):
        return net(given["x"]).square().mean()

    proof = proof_of(nn.Linear(16, 16), loss, [batch], (Atom(remedy="drop_sample", target="0:1"),))
    assert (proof.reference.outcome, proof.reference.dtype) == ("pass", "float64")
    assert proof.verdict == "isolated", proof.next_experiment


class OnDevice:
    """A gradient of 1 MiB on a device stands in for one."""

    device, nbytes = torch.device("cuda", 0), 2**20


@pytest.mark.parametrize(("place", "kept"), [(None, 1), ("cpu", 0)])
def test_gradients_wait_where_there_is_room(monkeypatch, place, kept):
    """On the device they count in no run that they wait beside."""
    given = FailingStep(FnStep(nn.Linear(1, 1), None, [{}]), 0, (0,))
    run = Attempt(1.0, (), None, "", 0.0, grads={"weight": OnDevice()}, peak_bytes=2**30)
    monkeypatch.setattr(exact, "place_for", lambda *_, **__: place)
    monkeypatch.setattr(exact, "copied_to_host", lambda _: torch.zeros(1))
    monkeypatch.setattr(ExactRuns, "_on", lambda *_, **__: run)
    runs = ExactRuns(given)
    assert isinstance(runs.of(0).grads["weight"], OnDevice) == bool(kept)
    assert runs.peak_of(run) == 2**30 - kept * 2**20
    assert runs.peak_of(replace(run, peak_bytes=None)) is None


def normalised(x):
    """Divide by a deviation that is the rounding of the numbers that it is a difference of."""
    var = x.square().mean(1, keepdim=True) - x.mean(1, keepdim=True).square()
    return (x - x.mean(1, keepdim=True)) / torch.sqrt(var + 1e-6)


class Normalised(nn.Linear):
    def forward(self, x):
        return super().forward(normalised(x))


@pytest.mark.parametrize("is_within", [True, False])
def test_a_clamp_of_what_only_rounding_took_below_0_is_not_proven(is_within):
    """Rows that do not fail are as far from float64 as those that do: they are no measure."""

    def loss(net, batch):
        given = batch["x"] if is_within else normalised(batch["x"])
        return (net(given).squeeze(1) - batch["y"]).square().mean()

    torch.manual_seed(0)
    batch = {"x": 0.05 * torch.randn(16, 8) + 3000.0, "y": torch.randn(16)}
    net = (Normalised if is_within else nn.Linear)(8, 1)
    code = normalised.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + 3}"
    proof = proof_of(net, loss, [batch], (Atom(remedy="form", target=line, value="guarded"),))
    assert proof.verdict == "plausible", proof.reference
    assert proof.reference.fails_in == (() if is_within else ("float32",))


def test_what_fails_behind_the_first_cause_is_named():
    def loss(net, batch):
        error = net(batch["x"]).square().mean(1)
        return error.mean() + (error * batch["m"]).sum() / batch["m"].sum()

    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8), "m": torch.zeros(4)}
    batch["x"][1, 2] = torch.nan
    first, line = __file__, loss.__code__.co_firstlineno + 1
    zeros = (Atom(remedy="finite_constant", target=f"{first}:{line}", value="0:x"),)
    proof = proof_of(nn.Linear(8, 4), loss, [batch], zeros)
    assert proof.verdict == "none_found"
    assert proof.next_experiment == (
        f"once what fails first is gone, `div` at test_exact.py:{line + 1} fails; float64 fails too"
    )


def test_a_clamp_is_proven_where_the_loss_in_float64_is_the_same():
    """In float64 nothing is left of a difference but 0, whose root has no derivative."""

    def loss(net, batch):
        out = net(batch["x"])
        spread = torch.sqrt(out.square().mean(1) - out.mean(1).square())
        return (spread - batch["y"]).square().mean()

    torch.manual_seed(1)
    batch = {"x": torch.randn(12, 10, 6), "y": torch.rand(12, 4)}
    batch["x"][4] = batch["x"][4, :1]
    code = loss.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + 2}"
    proof = proof_of(
        nn.Linear(6, 4), loss, [batch], (Atom(remedy="form", target=line, value="guarded"),)
    )
    assert (proof.verdict, proof.reference.fails_in) == ("proven", ("float32", "float64"))


def test_an_eps_that_is_0_in_float16_has_a_proven_guard():
    def loss(net, batch):
        low, high = batch["t"].amin(-1, keepdim=True), batch["t"].amax(-1, keepdim=True)
        scaled = (batch["t"] - low) / (high - low + 1e-8)
        return (net(batch["x"]).sigmoid() - scaled.float()).square().mean()

    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6), "t": torch.rand(8, 4).half()}
    batch["t"][2] = 0.5
    line = f"{loss.__code__.co_filename}:{loss.__code__.co_firstlineno + 2}"
    proof = proof_of(
        nn.Linear(6, 4), loss, [batch], (Atom(remedy="form", target=line, value="guarded"),)
    )
    assert proof.verdict == "proven", proof.next_experiment
