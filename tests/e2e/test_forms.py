"""Failing lines in another form: proposed, proven on the failing step, in force from then on."""

import warnings
from contextlib import suppress

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import nanstop
from e2e.scripts import run
from nanstop.report.text.terminal import render

WIDTH, ROWS = 8, 4
NO_WEIGHT = torch.ones(WIDTH)
NO_WEIGHT[0] = 0.0
TEXTS, LENGTHS = torch.tensor([[3, 3], [3, 4]]), torch.tensor([2, 2])


def batch(seed):
    """Scores' scale ``s`` and factor ``z`` by row, a mask, labels, targets, directions."""
    generator = torch.Generator().manual_seed(seed)
    x, z, t, u = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(4))
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    return {
        "x": x,
        "s": torch.ones(ROWS, 1),
        "z": z + 3,
        "m": mask,
        "y": torch.arange(ROWS),
        "t": (t > 0).float(),
        "u": u,
    }


def large(given):
    given["s"][1] = 200.0


def zero(given):
    given["z"][1] = 0.0


def hidden(given):
    given["m"][1] = False


def unlabelled(given):
    given["y"][1] = -100


def as_it_is(given):
    pass


# The loss of a network's scores ``v``; each on one line: a form is that of a line.
STABLE = {
    "log softmax": lambda v, b: -torch.log(torch.softmax(v * b["s"], -1)).mean(),
    "module": lambda v, b: -nn.Softmax(-1)(v * b["s"])[:, 0].log().mean(),
    "binary cross-entropy": lambda v, b: (
        -(
            b["t"] * (v * b["s"]).sigmoid().log()
            + (1 - b["t"]) * (1 - (v * b["s"]).sigmoid()).log()
        ).mean()
    ),
    "log sum exp": lambda v, b: (v * b["s"]).exp().sum(-1).log().mean(),
    "log mean exp": lambda v, b: torch.log(torch.exp(v * b["s"]).mean(-1)).mean(),
    "softplus": lambda v, b: torch.log(1 + torch.exp(v * b["s"])).mean(),
    "log1p exp": lambda v, b: torch.log1p(torch.exp(v * b["s"])).mean(),
    "quotient": lambda v, b: (torch.exp(v * b["s"]) / torch.exp(v * b["s"] - 1)).mean(),
    "entropy": lambda v, b: -((v * b["s"]).softmax(-1) * (v * b["s"]).softmax(-1).log()).sum(),
    "product": lambda v, b: -(v * b["s"]).softmax(-1).prod(-1).log().mean(),
}
GUARDED = {
    "log of a rest": (lambda v, b: -(1 - (v * b["s"]).tanh().abs()).log().mean(), large),
    "root": (lambda v, b: (v * b["z"]).square().sum(-1).sqrt().mean(), zero),
    "power": (lambda v, b: ((v * b["z"]).square().sum(-1) ** 0.5).mean(), zero),
    "norm": (lambda v, b: (v * b["z"] / (v * b["z"]).norm(dim=-1, keepdim=True)).sum(), zero),
    "norm that is masked": (  # whose backward chooses, too
        lambda v, b: (v * b["m"] / (v.norm(dim=-1, keepdim=True) * b["m"][:, :1])).mean(),
        hidden,
    ),
    "inverse root": (
        lambda v, b: (v * b["z"] * torch.rsqrt((v * b["z"]).square().mean(-1, True))).sum(),
        zero,
    ),
    "largest": (lambda v, b: (v * b["z"] / (v * b["z"]).abs().amax(-1, True)).sum(), zero),
    "count": (lambda v, b: ((v * b["m"]).sum(-1) / b["m"].sum(-1)).mean(), hidden),
    "inverse": (
        lambda v, b: ((v * b["z"]).sum(-1) * b["z"].abs().sum(-1).reciprocal()).mean(),
        zero,
    ),
    "logarithm": (lambda v, b: (b["z"].abs().sum(-1) * v.exp().sum(-1)).log().mean(), zero),
    "where": (lambda v, b: torch.where(b["z"] > 0, (b["z"].abs() * v.exp()).sqrt(), 0).sum(), zero),
    "where quotient": (lambda v, b: torch.where(b["z"] != 0, v / b["z"], 0.0).mean(), zero),
    "arc cosine": (lambda v, b: torch.acos(torch.tanh(v * b["s"])).mean(), large),
    "hidden row": (lambda v, b: (v.masked_fill(~b["m"], -torch.inf).softmax(-1) * v).sum(), hidden),
    "deviation of one": (lambda v, b: v[:1, :1].std() + v.sum(), as_it_is),
    "no label": (
        lambda v, b: torch.stack(
            [F.cross_entropy(r, y) for r, y in zip(v, b["y"], strict=True)]
        ).mean(),
        unlabelled,
    ),
    "text that does not fit": (
        lambda v, b: F.ctc_loss(v.view(2, 2, WIDTH).log_softmax(-1), TEXTS, LENGTHS, LENGTHS),
        as_it_is,
    ),
}


def of_two_lines(v, b):
    root = (v * b["z"]).square().sum(-1, keepdim=True).sqrt()
    return (v * b["z"] / root).sum()


def test_forms_of_two_lines_are_found_one_after_the_other():
    watch, _ = investigated(of_two_lines, zero)
    (incident,) = watch.incidents
    atoms = incident.proof.minimal
    assert (incident.proof.verdict, {atom.remedy for atom in atoms}) == ("proven", {"form"})
    assert len({atom.target for atom in atoms}) == 2


def of_cancelled_squares(v, b):
    x = v + b["s"] - 1
    variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
    normed = (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5)
    return (v.sum(-1) * (normed.square().sum(-1) - WIDTH + 1)).mean()


def far_off(given):
    given["s"][1] = 43210.0


def test_a_guard_does_not_take_the_place_of_digits_that_rounding_took():
    """In float64 the row has a deviation; a guard gives it another one, and other gradients."""
    watch, _ = investigated(of_cancelled_squares, far_off)
    (incident,) = watch.incidents
    assert incident.proof.reference.dtype == "float64"
    assert incident.proof.verdict != "proven"
    assert "computed in float64, with all before it, it is finite" in render(incident)
    assert incident.diagnoses[0].usual_cure.startswith("Let nothing cancel before it")


def of_a_mixture(v, b):
    z = v / b["z"]
    log = (-0.5 * z * z - (b["z"] * v.exp()).abs().log()) * (b["z"] != 0.0)
    return -log.logsumexp(-1).mean()


def of_one_density(given):
    given["z"][1, :3] = 0.0


def test_an_infinity_that_the_loss_leaves_out_has_a_form_where_it_is_made():
    watch, _ = investigated(of_a_mixture, of_one_density)
    (incident,) = watch.incidents
    assert incident.proof.verdict == "proven"
    assert len({atom.target for atom in incident.proof.minimal}) == 2


def of_two_operations(v, b):
    spread = (v * b["z"]).square().sum(-1, keepdim=True)
    scaled = b["z"] / spread
    return (scaled * v.log_softmax(-1)).sum() + spread.log().mean()


def test_of_a_second_line_what_fails_there_is_typed_and_nothing_else():
    incident, text = shown(of_two_operations, zero)
    first, second = incident.proof.minimal
    assert (incident.proof.verdict, first.value) == ("proven", "guarded")
    assert second.value == "guarded:log"
    assert text.count("a value where it has none") == 1
    typed = text.partition("in code:")[2]
    assert "spread.clamp(" in typed
    assert "v.log_softmax(-1)).sum()" in typed


def test_a_batch_without_a_healthy_row_is_judged_by_the_one_before():
    def nothing_kept(given):
        given["m"][:] = False

    watch, _ = investigated(lambda v, b: (v * b["m"]).sum() / b["m"].sum(), nothing_kept)
    (incident,) = watch.incidents
    assert incident.proof.verdict == "proven"
    assert incident.proof.minimal[0].remedy == "form"


def test_without_a_healthy_row_or_a_step_before_smaller_weights_tell_the_function():
    """Saturated throughout: `log(sigmoid(v))` has no value for any row, in float64 either."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        net[2].bias.fill_(-2000.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with nanstop.watch(net, optimizer) as watch:
        watch.step(lambda now: -torch.log(torch.sigmoid(net(now["x"]))).mean(), batch(0))
        watch.update()
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "stable_form")
    assert incident.audit[-1].outcome == "done"


def test_a_temperature_of_0_proves_no_form():
    tau = [1.0]

    def cold(_given):
        tau[0] = 0.0

    watch, _ = investigated(lambda v, _: (v / tau[0]).softmax(-1)[:, 0].mean(), cold)
    assert watch.incidents
    assert all(incident.proof is None for incident in watch.incidents)


def investigated(loss, spoil, **policy):
    """Return the watch over four steps of which the third is spoiled, and the network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with (
        warnings.catch_warnings(),
        nanstop.watch(net, optimizer, policy=nanstop.Policy(**policy)) as watch,
    ):
        warnings.simplefilter("ignore")  # torch says so of a deviation of one
        for step in range(4):
            given = batch(step)
            if step == 2:
                spoil(given)
            watch.step(lambda now: loss(net(now["x"]), now), given)
            watch.update()
    return watch, net


@pytest.mark.parametrize("name", STABLE)
def test_a_stable_form_is_proven_and_applied(name):
    watch, _ = investigated(STABLE[name], large)
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "stable_form")
    assert incident.audit[-1].action.kind == "redo"


def focal(v, b):
    p = (v * b["s"]).sigmoid()
    chosen = torch.where(b["t"] > 0, p, 1 - p)
    return (-((1 - chosen) ** 2) * torch.log(chosen)).mean()


def squashed(v, b):
    a = torch.tanh(v * b["s"])
    return (a - torch.log(1 - a.pow(2))).mean()


def nearly_sure(given):
    given["s"][:] = 30.0
    large(given)


@pytest.mark.parametrize("spoil", [large, nearly_sure])
@pytest.mark.parametrize(
    ("loss", "code"), [(focal, "F.logsigmoid"), (squashed, "F.softplus(-2 * ")]
)
def test_a_form_may_keep_digits_that_the_old_one_loses(loss, code, spoil):
    incident, text = shown(loss, spoil)
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "stable_form")
    assert incident.proof.typed == incident.proof.minimal
    assert code in text


@pytest.mark.parametrize("name", GUARDED)
def test_a_guarded_form_is_proven_and_applied_where_it_is_allowed(name):
    watch, net = investigated(*GUARDED[name], allow=("form",))
    incident = watch.incidents[0]
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "form")
    assert incident.audit[-1].action.kind in ("redo", "adopt")
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_guarded_form_is_help_only_where_it_is_not_allowed():
    watch, _ = investigated(*GUARDED["root"])
    (incident,) = watch.incidents
    assert incident.proof.minimal[0].remedy == "form"
    assert incident.audit[-1].action.kind == "skip"


def quotient_of_a_logarithm(v, b):
    rest = b["z"].abs().sum(-1)
    return ((v.exp().sum(-1) * rest).log() / rest * (rest > 0)).mean()


def root_of_a_share(v, b):
    count = b["m"].sum(-1)
    root = (v * b["m"]).square().sum(-1) / count
    return root.clamp(min=1e-6).sqrt().mean()


def shown(loss, spoil):
    """The report of the one incident of a loss, and its text."""
    (incident,) = investigated(loss, spoil)[0].incidents
    return incident, render(incident)


def test_code_is_shown_that_gives_on_the_failing_step_what_the_form_gives():
    incident, text = shown(root_of_a_share, hidden)
    assert incident.proof.typed == incident.proof.minimal
    assert '+ root = (v * b["m"]).square().sum(-1) / count.clamp(min=1)' in text
    assert "not run" not in text


def direction(v, b):
    """A vector of zeros whose own gradient is not 0: over an eps of 1e-12 it is 1e12 times that."""
    w = v - v.detach() * ~b["m"]
    return (w / w.norm(dim=-1, keepdim=True)).sum()


def test_a_longer_code_is_shown_where_the_shorter_one_has_another_gradient():
    incident, text = shown(direction, hidden)
    assert [atom.value for atom in incident.proof.typed] == ["masked"]
    assert "+ return (w / divisor.masked_fill(divisor == 0, 1)).sum()" in text
    assert "the form that can be typed here" not in text


def test_code_is_not_shown_that_does_less_than_the_form():
    incident, text = shown(quotient_of_a_logarithm, zero)
    assert incident.proof.verdict == "proven"
    assert incident.proof.typed == ()
    assert "in code" not in text


def test_code_that_was_not_run_is_told_from_code_that_was():
    incident, text = shown(*GUARDED["largest"])  # a lambda in a dict, beside others
    assert incident.proof.typed is None
    assert "(not run on this step)" in text


class Share(nn.Module):
    """A network whose own forward divides by what may be 0."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, count):
        return self.inner(x).square() * (count > 0) / count


def shared_in_the_model(net, b):
    return net(b["x"], b["m"].sum(-1, keepdim=True)).mean()


def shared_in_the_loss(net, b):
    given = net(b["x"], torch.ones(1)) * b["m"]
    return (given.sum(-1) / b["m"].sum(-1)).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "needs"),
    [(shared_in_the_model, True), (shared_in_the_loss, False)],
)
def test_a_saved_model_needs_what_its_own_forward_needs(loss, needs, capsys):
    torch.manual_seed(0)
    net = Share()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with nanstop.watch(net, optimizer, policy=nanstop.Policy(allow=("form",))) as watch:
        for step in range(3):
            given = batch(step)
            if step == 0:  # what fails at the first step is cured for the rest of the run
                hidden(given)
            watch.step(lambda now: loss(net, now), given)
            watch.update()
    assert watch.incidents[0].audit[-1].action.kind == "adopt"
    assert ("saved of the model" in capsys.readouterr().err) == needs


class WithoutEps(torch.optim.Optimizer):
    """RMSprop as one writes it by hand, and the same with its squares' root taken of too little."""

    def __init__(self, params, lr=1e-3, centred=False):
        super().__init__(params, {"lr": lr, "centred": centred})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["v"] = torch.zeros_like(p)
                state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                if group["centred"]:
                    denom = (state["v"] - 0.1 * (1 + 1e-6) * p.grad**2).sqrt() + 1e-12
                    p -= group["lr"] * p.grad / denom
                else:
                    p -= group["lr"] * p.grad / state["v"].sqrt()


def updated_by_hand(*, centred):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 1))
    optimizer = WithoutEps(net.parameters(), centred=centred)
    policy = nanstop.Policy(allow=("form",), on_stop="end")
    with nanstop.watch(net, optimizer, policy=policy) as watch:
        for step in range(4):
            ids = torch.arange(4) + step
            watch.step(lambda now: (net(now) - 1).square().mean(), ids)
            watch.update()
    return watch, net


def test_a_line_of_an_own_optimizer_has_a_form(capsys):
    watch, net = updated_by_hand(centred=False)
    (incident,) = watch.incidents
    assert incident.diagnoses[0].code == "NS402"
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "form")
    said = capsys.readouterr().err
    assert 'divisor = state["v"].sqrt()' in said
    assert 'p -= group["lr"] * p.grad / divisor.masked_fill(divisor == 0, 1)' in said
    assert "saved of the model" not in said
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_form_under_which_an_update_ruins_what_follows_is_not_proven():
    watch, _ = updated_by_hand(centred=True)
    incident = watch.incidents[0]
    assert incident.diagnoses[0].code == "NS402"
    assert incident.proof.verdict != "proven"


LOOP = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    if step in (3, 7, 8, 20):
        x[1] *= 2000
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(net.state_dict(), sys.argv[1])
"""


def test_a_loop_ends_as_if_its_line_had_been_changed_by_hand(tmp_path):
    chosen = "gather(1, torch.arange(4)[:, None]).mean()"
    failing = f"-torch.log(torch.softmax(net(x), -1)).{chosen}"
    stable = f"-torch.log_softmax(net(x), -1).{chosen}"
    script, changed = tmp_path / "train.py", tmp_path / "changed.py"
    script.write_text(LOOP.format(loss=failing))
    # The form is in force for the first failing step and, adopted, from the second one on.
    by_hand = f"{stable} if step == 3 or step >= 7 else {failing}"
    changed.write_text(LOOP.format(loss=by_hand))
    watched = run(tmp_path, "train.py", "watched.pt")
    run(tmp_path, "changed.py", "changed.pt", watched=False)
    assert [row["action"] for row in watched.rows] == ["redo", "adopt"]
    assert {row["remedy"] for row in watched.rows} == {"compute `train.py:14` in log space"}
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("watched", "changed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


CHECKPOINTED = """
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        h = self.linear(x)
        spread = h.var(-1, keepdim=True) - 1e-4
        return {form} * h


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Linear(16, 2)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant={reentrant})
        return self.out(x)


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(12):
    x = torch.randn(4, 16).requires_grad_() * (1e-3 if step in (4, 7, 9) else 3.0)
    loss = net(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(net.state_dict(), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_form_holds_in_what_checkpointing_runs_again(tmp_path, reentrant):
    """Torch takes a mode off the stack while it handles ``backward``."""
    clamped = "torch.sqrt(spread.clamp(min=torch.finfo(spread.dtype).tiny))"
    for name, form in {"train.py": "torch.sqrt(spread)", "changed.py": clamped}.items():
        (tmp_path / name).write_text(CHECKPOINTED.format(form=form, reentrant=reentrant))
    watched = run(tmp_path, "train.py", "watched.pt", options=("--allow", "form"))
    run(tmp_path, "changed.py", "changed.pt", watched=False)
    assert watched.rows[-1]["action"] == "adopt"
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("watched", "changed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Classifier(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model(inputs["x"])
        loss = -self.log_probabilities(scores)[torch.arange(len(scores)), inputs["labels"]].mean()
        return (loss, scores) if return_outputs else loss

    def log_probabilities(self, scores):
        return torch.log(torch.softmax(scores, -1))


class Patched(Classifier):
    """The stable line where the other one fails, and always from the second failure on."""

    failures = 0

    def log_probabilities(self, scores):
        failing = super().log_probabilities(scores)
        self.failures += not failing.isfinite().all()
        stable = self.failures >= 2 or not failing.isfinite().all()
        return torch.log_softmax(scores, -1) if stable else failing


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x, labels=None):
        return self.linear(x)


def trained(kind, folder, *, watched):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = [
        {
            "x": torch.randn(WIDTH, generator=generator) * (3000 if row in (9, 33, 34) else 1),
            "labels": row % 5,
        }
        for row in range(48)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        learning_rate=1e-2,
        optim="sgd",
        disable_tqdm=True,
    )
    trainer = kind(model=Scores(), args=arguments, train_dataset=data)
    if watched:
        nanstop.watch(trainer)
    trainer.train()
    return trainer.model.state_dict()


def test_a_trainer_ends_as_if_its_line_had_been_changed_by_hand(tmp_path):
    ours = trained(Classifier, tmp_path / "watched", watched=True)
    theirs = trained(Patched, tmp_path / "changed", watched=False)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Masked(nn.Module):
    """Scores under autocast with a mask's number that float16 does not hold."""

    def __init__(self, *, as_weights, in_place=False):
        super().__init__()
        self.inner, self.as_weights = nn.Linear(WIDTH, WIDTH), as_weights
        self.in_place = in_place

    def forward(self, x, mask):
        with torch.autocast("cpu", dtype=torch.float16):
            scores = self.inner(x)
            if self.in_place:
                scores.masked_fill_(~mask, -1e9)
            else:
                scores = scores.masked_fill(~mask, -1e9)
        return scores.float().softmax(-1) if self.as_weights else 1e-3 * scores.float()


@pytest.mark.parametrize(("as_weights", "in_place"), [(True, False), (False, False), (True, True)])
def test_a_fill_beyond_its_format_is_a_fill_with_what_that_holds(as_weights, in_place):
    """Where the number itself is used, another one is another function."""
    torch.manual_seed(0)
    net = Masked(as_weights=as_weights, in_place=in_place)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    given = batch(0)
    given["m"][:, :2] = False
    with suppress(RuntimeError), nanstop.watch(net, optimizer) as watch:
        watch.step(lambda now: (net(now["x"], now["m"]) * now["t"]).sum(), given)
    (incident,) = watch.incidents
    (atom,) = incident.proof.minimal
    assert (atom.remedy == "held_fill") == as_weights
    assert incident.proof.verdict == "proven"
    made = "scores.masked_fill_(" if in_place else "scores = scores.masked_fill("
    new, text = f"+ {made}~mask, torch.finfo(scores.dtype).min)", render(incident)
    assert (new in text) == as_weights
    assert "not run" not in text


def energy(scores):
    return scores.pow(2).sum() / 1024


@pytest.mark.slow
def test_a_line_not_of_the_model_that_overflows_in_half_is_computed_in_float32():
    """The line alone is what a person would change: no module holds it."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    rows = 300 * torch.randn(32, WIDTH)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            scores = net(x)
        return energy(scores)

    with nanstop.watch(net, optimizer) as watch:
        watch.step(loss, rows)
        assert watch.update()
    (incident,) = watch.incidents
    assert [atom.remedy for atom in incident.proof.minimal] == ["fp32_line"]
    assert incident.proof.verdict == "proven"
    assert incident.audit[-1].action.kind == "adopt"
    assert "+ return scores.float().pow(2).sum() / 1024" in render(incident)
