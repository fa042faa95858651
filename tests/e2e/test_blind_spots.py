"""No operation, tensor or evaluation that hides a failure: each script fails where one could, its
healthy twin is left as it is and hears nothing.
"""

import linecache

import pytest

from e2e.scripts import HEAD
from loop_scripts import investigated, run_script
from nanstop.report.text.run_end import RunEnd

STEPS = """
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
losses = []
for step in range(4):
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    loss = objective(step, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
PARAMETERS = list(net.parameters())
"""

MASKS = {
    "filled": "net(x).masked_fill(hidden, float('-inf'))",
    "chosen": "torch.where(hidden, torch.tensor(float('-inf')), net(x))",
    "added": "net(x) + torch.tensor([0.0] * 3 + [float('-inf') if bad else 0.0])",
    "NumPy": "net(x) + torch.from_numpy(numpy.where(hidden.numpy(), -numpy.inf, 0.0))",
}


def objective(body):
    return f"""
def objective(step, x, y):
    bad = BAD and step == 2
    hidden = torch.zeros(6, 4, dtype=torch.bool)
    hidden[1, 2] = bad
    return {body}
"""


def told(folder, source, **values):
    """Return the incident that a failing script has, after its healthy twin was left alone."""
    plain = run_script(folder / "plain.py", source, BAD=False, **values)
    healthy, news = investigated(folder / "healthy.py", source, BAD=False, **values)
    assert all(isinstance(one, RunEnd) for one in news)
    assert str(healthy.get("losses")) == str(plain.get("losses"))
    assert all(map(lambda a, b: bool((a == b).all()), healthy["PARAMETERS"], plain["PARAMETERS"]))
    _, news = investigated(folder / "bad.py", source, BAD=True, **values)
    assert news, "nothing was said"
    return news[0]


def line_of(report):
    source = report.localization.first_bad.source
    return linecache.getline(source.file, source.line)


HEAD = HEAD.replace('BAD = "bad" in sys.argv\n', "import numpy\n")


@pytest.mark.parametrize("spelled", MASKS)
def test_a_mask_without_a_softmax_is_found_where_it_is_made(tmp_path, spelled):
    report = told(tmp_path, HEAD + objective(f"({MASKS[spelled]}).mean()") + STEPS)
    best = report.diagnoses[0]
    assert (best.code, best.confidence) == ("NS204", "certain")
    assert best.title.startswith("-inf ")
    assert best.title.endswith("reaches the loss")
    assert "return (" in line_of(report)
    assert report.localization.blind_spots == ()


CONSTANTS = {
    "weights": """
weights = torch.ones(4) / ZERO

def loss_of(out, x, y):
    return F.cross_entropy(out, y, weight=weights)
""",
    "pos_weight": """
def made(pos):
    pos_weight = pos / ZERO
    return lambda out, x, y: F.binary_cross_entropy_with_logits(
        out, (x[:, :4] > 0).float(), pos_weight=pos_weight
    )

loss_of = made(torch.ones(4))
""",
    "criterion.weight": """
criterion = nn.CrossEntropyLoss(weight=torch.ones(4) / ZERO)

def loss_of(out, x, y):
    return criterion(out, y)
""",
    "criterion.deviation": """
class Scaled(nn.Module):
    def __init__(self, deviation):
        super().__init__()
        self.register_buffer("deviation", deviation)

    def forward(self, out):
        return (out * self.deviation).square().mean()

criterion = Scaled(torch.ones(4) / ZERO)

def loss_of(out, x, y):
    return criterion(out)
""",
    "scale": """
scale = torch.tensor(1.0) / ZERO

def loss_of(out, x, y):
    return (out * scale).mean()
""",
}


def test_a_buffer_that_the_model_writes_to_is_no_constant(tmp_path):
    made = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x):
        out = self.linear(x) * self.spread
        self.spread = self.spread * 0.0 / (0.0 if BAD else 1.0)
        return out

net = Scaled()
"""
    loop = STEPS.replace("net = nn.Linear(8, 4)\n", "")
    report = told(tmp_path, HEAD + made + objective("net(x).square().mean()") + loop)
    best, found = report.diagnoses[0], report.localization
    assert best.title == "state of the script not finite: `self.spread`"
    assert found.culprit == "self.spread"
    assert not found.made_before
    assert found.made.text.startswith("self.spread = ")


@pytest.mark.parametrize(
    "write", ["self.mean.lerp_(kept.mean(0), 0.1)", "self.mean[:] = kept.mean(0)"]
)
@pytest.mark.parametrize("kind", ["a module", "an object"])
def test_what_a_step_writes_to_in_place_was_not_so_before_it(tmp_path, kind, write):
    made = f"""
class Centred{"(nn.Module)" if kind == "a module" else ""}:
    def __init__(self):
        {"super().__init__()" if kind == "a module" else "pass"}
        {
        'self.register_buffer("mean", torch.zeros(8))'
        if kind == "a module"
        else "self.mean = torch.zeros(8)"
    }

    def __call__(self, x, bad):
        kept = x[x[:, 0] > (100.0 if bad else -100.0)]
        {write}
        return x - self.mean

centred = Centred()
"""
    called = "net(centred(x, bad)).square().mean()"
    report = told(tmp_path, HEAD + made + objective(called) + STEPS)
    best, found = report.diagnoses[0], report.localization
    assert (best.code, found.culprit, found.made_before) == ("NS506", "centred.mean", False)
    assert found.made.text == write
    assert "before the step" not in best.cause
    assert best.lines == (f"given its values in line {found.made.line}: `{write}`",)


CARRIED = {
    "mean": """
mean = torch.tensor(1.0)
""",
    "means": """
mean = torch.ones(4)
""",
    "self.mean": """
class Running:
    def __init__(self):
        self.mean = torch.tensor(1.0)

    def __call__(self, loss):
        out = loss / (self.mean + 1.0)
        self.mean = 0.5 * self.mean + 0.5 * loss.detach()
        return out

running = Running()
""",
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_a_step_that_failed_left_in_the_scripts_state(tmp_path, name):
    takes = {
        "mean": "loss = loss / (mean + 1.0)\n    mean = 0.5 * mean + 0.5 * loss.detach()",
        "means": "loss = loss / (mean.mean() + 1.0)\n    mean = 0.5 * mean + loss.detach()",
        "self.mean": "loss = running(loss)",
    }[name]
    loop = STEPS.replace("    optimizer.zero_grad()", f"    {takes}\n    optimizer.zero_grad()")
    spoilt = objective("net(x * (float('nan') if bad else 1.0)).square().mean()")
    source = HEAD + CARRIED[name] + spoilt + loop
    told(tmp_path, source)
    _, news = investigated(tmp_path / "again.py", source, on_failure="skip", BAD=True)
    last = [one for one in news if not isinstance(one, RunEnd)][-1]
    best, found = last.diagnoses[0], last.localization
    assert (best.code, best.confidence, found.origin) == ("NS506", "likely", "carried_over")
    assert found.culprit == {"means": "mean", "self.mean": "running.mean"}.get(name, name)
    assert f"`{found.culprit}`" in best.usual_cure


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_is_named_as_what_it_is(tmp_path, name):
    # Made before there is an optimizer: no tape has seen it.
    made = "ZERO = torch.tensor(0.0 if BAD else 1.0)\n" + CONSTANTS[name]
    report = told(tmp_path, HEAD + made + objective("loss_of(net(x), x, y)") + STEPS)
    best, found = report.diagnoses[0], report.localization
    assert (best.code, best.confidence, found.culprit) == ("NS506", "certain", name)
    assert found.made is not None
    assert found.made_before
    assert found.made.text in made
    assert f"`{found.made.text}`" in best.lines[0]
    assert best.title == f"variable not finite: `{name}`"


BARE = """
W = torch.randn(8, 4, requires_grad=True)
b = torch.zeros(4, requires_grad=True)
losses = []
BEGIN
for step in range(4):
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    chances = (x @ W + b).softmax(-1)
    if BAD and step == 2:
        chances = chances * 0
    loss = -torch.log(chances)[range(6), y].mean()
    loss.backward()
    UPDATE
    losses.append(loss.item())
PARAMETERS = [W, b]
"""
UPDATES = {
    "an optimizer": (
        "optimizer = torch.optim.Adam([W, b], 1e-2)",
        "optimizer.step(); optimizer.zero_grad()",
    ),
    "data": ("", "W.data -= 0.1 * W.grad; b.data -= 0.1 * b.grad; W.grad = b.grad = None"),
    "no_grad": ("", "with torch.no_grad(): W -= 0.1 * W.grad; W.grad = None"),
    "new leaves": ("", "W, b = [(p - p.grad / 9).detach().requires_grad_() for p in (W, b)]"),
}  # fmt: skip


@pytest.mark.parametrize("spelled", UPDATES)
def test_a_loop_over_bare_tensors(tmp_path, spelled):
    begin, update = UPDATES[spelled]
    report = told(tmp_path, HEAD + BARE.replace("BEGIN", begin).replace("UPDATE", update))
    best, replay = report.diagnoses[0], report.replay
    assert (best.code, best.confidence, report.incident.at.step) == ("NS207", "certain", 2)
    assert "torch.log(chances)" in line_of(report)
    assert replay is not None
    assert replay.num_failed == replay.runs


def test_a_module_updated_by_hand(tmp_path):
    source = objective("F.nll_loss(net(x).softmax(-1).mul(0 if bad else 1).log(), y)") + STEPS
    source = source.replace("optimizer = torch.optim.SGD(net.parameters(), 1e-2)", "")
    source = source.replace("optimizer.zero_grad()", "net.zero_grad()")
    by_hand = "[p.data.add_(p.grad, alpha=-1e-2) for p in net.parameters()]"
    report = told(tmp_path, HEAD + source.replace("optimizer.step()", by_hand))
    assert report.diagnoses[0].code == "NS207"
    assert report.incident.at.step == 2
    assert "log()" in line_of(report)


EVALUATED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden * hidden.square().sum())

def evaluated():
    with SCOPE:
        total = 0
        for i in range(3):
            x = torch.randn(6, 8) * (LARGE if BAD and i == 1 else 1)
            total += READ(F.cross_entropy(net(x), torch.zeros(6, dtype=torch.long)))
    return float(total)

def objective(step, x, y):
    return F.cross_entropy(net(x), y)
"""


@pytest.mark.parametrize(
    ("scope", "large"),
    [
        ("torch.no_grad()", "1e16"),
        ("torch.inference_mode()", "1e16"),
        ("torch.no_grad(), torch.autocast('cpu', torch.float16)", "1e3"),
    ],
)
@pytest.mark.parametrize("read", ["float", ""])
def test_an_evaluation_in_a_loop(tmp_path, scope, large, read):
    source = EVALUATED.replace("SCOPE", scope).replace("READ", read).replace("LARGE", large)
    source = HEAD + source
    source += STEPS.replace("nn.Linear(8, 4)", "Net()").replace("loss.item()", "evaluated()")
    report = told(tmp_path, source)
    assert (report.diagnoses[0].code, report.localization.key.phase) == ("NS201", "evaluate")
    assert "hidden.square()" in line_of(report)


ADVANTAGES = """
def objective(step, x, y):
    rewards = x[:, 0].clone()
    if BAD and step == 2:
        rewards[:3] = 0.5
    groups = rewards.view(2, 3)
    advantages = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)
    out = net(x).sum(-1)
    mask = torch.ones(6)
    twice = mask * 2.0
    mask[5] = 0.0
    return (out * advantages.flatten() * mask * twice).mean()
"""


def test_what_is_written_later_hides_nothing_of_what_was_made_before(tmp_path):
    report = told(tmp_path, HEAD + ADVANTAGES + STEPS)
    assert (report.diagnoses[0].code, report.diagnoses[0].confidence) == ("NS206", "certain")
    assert "groups.std" in line_of(report)


NESTED = """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, given):
        x, weight = given.values() if isinstance(given, dict) else given
        return self.net(x) * weight

def evaluated():
    with torch.no_grad():
        x = torch.randn(6, 8)
        x[2, 1] = float("nan") if BAD else 0.0
        return F.cross_entropy(net(GIVEN), torch.zeros(6, dtype=torch.long)).item()

def objective(step, x, y):
    return F.cross_entropy(net([x, torch.ones(1)]), y)
"""


@pytest.mark.parametrize(
    ("given", "name"),
    [("[x, torch.ones(1)]", "given.0"), ("{'x': x, 'weight': torch.ones(1)}", "x")],
)
def test_data_of_an_evaluation_that_a_model_is_given_in_one_piece(tmp_path, given, name):
    source = HEAD + NESTED.replace("GIVEN", given)
    source += STEPS.replace("nn.Linear(8, 4)", "Pair()").replace("loss.item()", "evaluated()")
    report = told(tmp_path, source)
    best = report.diagnoses[0]
    assert (best.code, best.confidence, best.where) == ("NS501", "certain", name)
    assert report.localization.key.phase == "evaluate"


VALIDATED = """
def validated():
    with torch.no_grad():
        logits = net(torch.randn(6, 8) * (1e3 if BAD else 1))
        nothing = logits.argmax(-1)[:0].float().mean().item(), torch.tensor(float("nan")).item()
        chances = torch.softmax(logits, -1)[:, :2]
        return READ, nothing

def objective(step, x, y):
    return F.cross_entropy(net(x), y)
"""


@pytest.mark.parametrize("read", ["-chances.log().mean().item()", "float(-chances.log().sum())"])
def test_a_loss_of_an_evaluation_whose_model_is_finite(tmp_path, read):
    source = HEAD + VALIDATED.replace("READ", read)
    report = told(tmp_path, source + STEPS.replace("loss.item()", "validated()"))
    assert (report.diagnoses[0].code, report.localization.key.phase) == ("NS207", "evaluate")
    assert "chances.log()" in line_of(report)


def test_a_score_of_an_evaluation_that_is_no_loss(tmp_path):
    """An accuracy over no row is NaN, and nobody trains on it."""
    source = VALIDATED.replace("READ", "(logits.argmax(-1) == 5).float().log().mean().item()")
    source = HEAD + source + STEPS.replace("loss.item()", "validated()")
    _, news = investigated(tmp_path / "script.py", source, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)


INSIDE = """
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))

    def forward(self, x):
        return self.inside(x)[:, :4] + 1e-3

def validated():
    with torch.no_grad():
        chances = net.inside(torch.randn(6, 8) * (1e3 if BAD else 1))
        (chances * 0 + 5).long()[:0].float().mean().item()  # an accuracy over no row
        return READ

def objective(step, x, y):
    return F.nll_loss(net(x).log(), y)
"""


def test_an_evaluation_of_what_is_inside_of_the_model(tmp_path):
    """As of `model.module`, which one rank evaluates by itself."""
    source = HEAD + INSIDE.replace("READ", "-chances.log().mean().item()")
    source += STEPS.replace("nn.Linear(8, 4)", "Outer()").replace("loss.item()", "validated()")
    report = told(tmp_path, source)
    assert (report.diagnoses[0].code, report.localization.key.phase) == ("NS207", "evaluate")
    assert "chances.log()" in line_of(report)


def test_a_score_of_what_is_inside_of_the_model_is_no_loss(tmp_path):
    source = HEAD + INSIDE.replace("READ", "(chances.argmax(-1) == 9).float().log().mean().item()")
    source += STEPS.replace("nn.Linear(8, 4)", "Outer()").replace("loss.item()", "validated()")
    _, news = investigated(tmp_path / "script.py", source, BAD=False)
    assert all(isinstance(one, RunEnd) for one in news)


COMPLEX = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))

    def forward(self, x):
        return x.to(torch.complex64) @ self.weight

def objective(step, x, y):
    x[1] *= 0 if BAD and step == 2 else 1
    out = net(x)
    return (out.real.square() + out.imag.square()).sqrt().mean()
"""


def test_a_complex_weight(tmp_path):
    report = told(tmp_path, HEAD + COMPLEX + STEPS.replace("nn.Linear(8, 4)", "Net()"))
    assert report.diagnoses[0].code == "NS304"
    assert report.localization.reaches == ("weight",)
    assert ".sqrt()" in line_of(report)


def test_a_complex_quotient(tmp_path):
    quotient = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(5, dtype=torch.cfloat)), nn.Linear(8, 4)

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.weight
        return self.head(torch.fft.irfft(spectrum / spectrum.abs(), n=8))

def objective(step, x, y):
    x[1] *= 0 if BAD and step == 2 else 1
    return F.cross_entropy(net(x), y)
"""
    report = told(tmp_path, HEAD + quotient + STEPS.replace("nn.Linear(8, 4)", "Net()"))
    best = report.diagnoses[0]
    assert (best.code, best.confidence) == ("NS206", "certain")
    assert "spectrum / spectrum.abs()" in line_of(report)


OPAQUE = """
class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, y, factor):
        with torch.enable_grad():
            hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            chances = (hidden @ weight.T).softmax(-1) * factor
            loss = -torch.log(chances)[torch.arange(len(y)), y].mean()
            ctx.grads = torch.autograd.grad(loss, (hidden, weight))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return (*(grad * each for each in ctx.grads), None, None)

def fused(step, x, y, bad):
    return Fused.apply(x, net.weight, y, 0.0 if bad else 1.0) + 0 * net(x).sum()

def offloaded(step, x, y, bad):
    with torch.autograd.graph.save_on_cpu():
        chances = net(x).softmax(-1) * (0 if bad else 1)
        return -torch.log(chances)[torch.arange(len(y)), y].mean()

def packed(step, x, y, bad):
    kept = []
    pack = lambda t: kept.append(t.clone()) or len(kept) - 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: kept[place]):
        chances = net(x).softmax(-1) * (0 if bad else 1)
        return -torch.log(chances)[torch.arange(len(y)), y].mean()

def exchanged(step, x, y, bad):
    shared = torch.from_dlpack(net(x).softmax(-1).detach())
    chances = net(x).softmax(-1) * (0 if bad else 1) + 0 * shared
    return -torch.log(chances)[torch.arange(len(y)), y].mean()

def windowed(step, x, y, bad):
    # The denominator is of all micro-batches, whose sums keep their graphs.
    total, count = 0, 0
    for place in range(3):
        total = total + net(x).softmax(-1).sum()
        count = count + (y >= 0).sum() * (0 if bad else 1)
    return -torch.log(count / total * total.detach() / total)

def counted(step, x, y, bad):
    # A mean over what came before.
    global mean
    mean = mean + net(x).softmax(-1).mean().detach() * (0 if bad else 1)
    chances = net(x).softmax(-1) * mean
    mean = torch.zeros(())
    return -torch.log(chances)[torch.arange(len(y)), y].mean()

mean = torch.zeros(())

@torch.library.custom_op("hiding::share", mutates_args=())
def share(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)

def slope(ctx, grad):
    shares = ctx.saved_tensors[0]
    return shares * (grad - (grad * shares).sum(-1, keepdim=True))

def keep(ctx, inputs, output):
    ctx.save_for_backward(output)

share.register_autograd(slope, setup_context=keep)

def library(step, x, y, bad):
    chances = share(net(x)) * (0 if bad else 1)
    return -torch.log(chances)[torch.arange(len(y)), y].mean()
"""


@pytest.mark.parametrize(
    "spelled", ["fused", "offloaded", "packed", "exchanged", "windowed", "counted", "library"]
)
def test_an_opaque_part_not_of_the_model_does_not_end_the_search(tmp_path, spelled):
    body = f"def objective(step, x, y):\n    return {spelled}(step, x, y, BAD and step == 2)\n"
    report = told(tmp_path, HEAD + OPAQUE + body + STEPS)
    assert "torch.log(" in line_of(report)
    assert (report.diagnoses[0].code, report.incident.at.step) == ("NS207", 2)
    assert report.replay.num_failed == report.replay.runs


def test_a_loss_that_torch_does_not_bring_is_named_as_one(tmp_path):
    loss = """
@torch.library.custom_op("hiding::nll", mutates_args=())
def nll(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -x.softmax(1).gather(1, y[:, None]).log().mean()

def slope(ctx, grad):
    x, y = ctx.saved_tensors
    return grad * (x.softmax(1) - F.one_hot(y, 4)) / len(y), None

def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)

nll.register_autograd(slope, setup_context=keep)

def objective(step, x, y):
    return nll(net(x) * (1e3 if BAD and step == 2 else 1), y)
"""
    report = told(tmp_path, HEAD + loss + STEPS)
    best = report.diagnoses[0]
    assert (best.code, best.confidence, report.incident.at.step) == ("NS602", "likely", 2)
    assert best.title == "custom operation `nll` is not finite"
    assert "no value" in best.cause
    assert line_of(report).strip().startswith("return nll(net(x)")
    assert report.replay.num_failed == report.replay.runs


def test_numbers_that_numpy_has_computed_are_no_batch(tmp_path):
    weighed = """
def objective(step, x, y):
    logits = net(x)
    with numpy.errstate(all="ignore"):
        weights = 1 / (logits.detach().numpy().var(1) * (0.0 if BAD and step == 2 else 1.0))
    weights = torch.from_numpy(weights)
    return (F.cross_entropy(logits, y, reduction="none") * weights).mean()
"""
    report = told(tmp_path, HEAD + weighed + STEPS)
    best, made = report.diagnoses[0], report.localization.made
    assert (best.code, best.confidence) == ("NS000", "possible")
    assert made.text == "weights = torch.from_numpy(weights)"
    assert any(f"line {made.line} brings the bad value in" in line for line in best.lines)


def test_what_cannot_be_called_again_is_said_so(tmp_path):
    once = """
left = []

class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        ctx.factor = left.pop()
        return out * ctx.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor

def objective(step, x, y):
    left.append(float("nan") if BAD and step == 2 else 1.0)
    return F.cross_entropy(Once.apply(net(x)), y)
"""
    report = told(tmp_path, HEAD + once + STEPS)
    assert report.replay is None
    assert any("cannot be called again (IndexError" in line for line in report.failures)


@pytest.mark.parametrize(
    "hide",
    ["scores[:, 3:] = float('-inf')", "scores = scores.masked_fill(arange > 2, float('-inf'))"],
)
def test_an_infinity_that_spoils_a_product_is_followed_to_the_line_that_writes_it(tmp_path, hide):
    body = f"""
arange = torch.arange(4)
def objective(step, x, y):
    scores, weights = net(x), torch.ones(6, 4)
    if step == 2:
        {hide}
        weights[:, 3:] = 0.0
    return (torch.log_softmax(scores, -1) * weights).sum()
"""
    _, news = investigated(tmp_path / "script.py", HEAD + body + STEPS)
    (report,) = (one for one in news if hasattr(one, "diagnoses"))
    (found,) = (one for one in report.diagnoses if one.code == "NS204")
    (line,) = (one for one in found.lines if "the program writes" in one)
    assert line.endswith(f": `{hide}`")


@pytest.mark.parametrize("layer", ["nn.LayerNorm(8, eps=0.0)", "nn.GroupNorm(2, 8, eps=0.0)"])
def test_a_layer_that_divides_by_a_deviation_of_0_is_one_by_a_norm(tmp_path, layer):
    source = f"""
norm, head = {layer}, nn.Linear(8, 2)
optimizer = torch.optim.SGD([*norm.parameters(), *head.parameters()], 1e-2)
for step in range(4):
    x = torch.randn(6, 8)
    if step == 2:
        x[:] = 0.5
    loss = head(norm(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    _, news = investigated(tmp_path / "script.py", HEAD + source)
    (report,) = (one for one in news if hasattr(one, "diagnoses"))
    assert report.diagnoses[0].code == "NS206"
    assert "its eps is 0" in report.diagnoses[0].cause
    assert report.diagnoses[0].confirmed


def test_a_buffer_that_no_operation_has_made_bad_is_named(tmp_path):
    source = """
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("bank", torch.full((20, 6), float("nan")))
    def forward(self, x):
        h = self.lin(x)
        with torch.no_grad():
            self.bank[: len(x)] = h
        return h @ self.bank[: len(x) + 1].t()
net = Memory()
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(2):
    loss = net(torch.randn(4, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    _, news = investigated(tmp_path / "script.py", HEAD + source)
    report = next(one for one in news if hasattr(one, "diagnoses"))
    assert (report.diagnoses[0].code, report.diagnoses[0].where) == ("NS506", "bank")
    assert "since before the first step" in report.diagnoses[0].cause


def test_a_scale_that_softplus_rounds_to_0_is_to_be_kept_from_it(tmp_path):
    body = """
def objective(step, x, y):
    scale = torch.nn.functional.softplus(net(x * 0) - (200.0 if step == 2 else 0.0))
    return torch.log(scale).mean()
"""
    _, news = investigated(tmp_path / "script.py", HEAD + body + STEPS)
    found = next(one for one in news if hasattr(one, "diagnoses")).diagnoses[0]
    assert found.code == "NS207"
    assert "rounded to exactly 0" in found.cause
    assert any("`softplus` at script.py" in one for one in found.lines)
    assert "F.softplus(x) + 1e-6" in found.usual_cure


@pytest.mark.parametrize(
    ("factor", "is_rounded"), [("1", True), ("(x[:, :1] < 3)", False), ("0", False)]
)
def test_a_product_that_is_rounded_to_0_is_told_from_one_that_is_masked(
    tmp_path, factor, is_rounded
):
    body = f"""
def objective(step, x, y):
    bad = step == 2
    if bad:
        x[2] = 30.0
    p = torch.sigmoid(net(x if bad else x * 0)) * ({factor} if bad else 1)
    p = p * torch.full((), 1e-30 if bad and {is_rounded} else 1.0)
    return 1 - p.prod(-1).pow(1 / 60).mean()
"""
    _, news = investigated(tmp_path / "script.py", HEAD + body + STEPS)
    report = next(one for one in news if hasattr(one, "diagnoses"))
    found = report.diagnoses[0]
    assert found.code == "NS304"
    assert any("rounds to 0 what is not 0" in one for one in found.lines) is is_rounded
