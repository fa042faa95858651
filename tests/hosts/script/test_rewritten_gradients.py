"""A script that writes to its gradients between their backward and the update."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanstop
from loop_scripts import run_script, same, weights
from nanstop.decide.policy import Policy
from nanstop.session.factory import opener
from nanstop.store.incidents import Store, load_report

torch.set_num_threads(1)
SCALE = 1024
HEAD = f"""
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), 0.05)
PARAMETERS = list(net.parameters())
SCALE, BAD = {SCALE}, 5
"""
UNSCALED = {
    "in place": "for p in PARAMETERS: p.grad.div_(SCALE)",
    "all at once": "torch._foreach_div_([p.grad for p in PARAMETERS], SCALE)",
    "by other tensors": "for p in PARAMETERS: p.grad.data /= SCALE",
    "anew": "for p in PARAMETERS: p.grad = p.grad / SCALE",
}
LOOP = """
for step in range(9):
    x = torch.randn(8, 6)
    opt.zero_grad()
    (SCALE * F.mse_loss(net(x), x.sum(-1, keepdim=True))).backward()
    {unscaled}
    if step == BAD:
        {bad}
    {update}
"""
SPOILT = """for p in PARAMETERS: p.grad /= torch.zeros(())"""


def run(folder, source, **policy):
    store = Store(folder / "out")
    store.reset()
    session = opener(Policy(**policy), store, lambda _: None)
    ending = run_script(folder / "script.py", source, session)
    return ending, written(folder / "out")


def written(out):
    return [load_report(path) for path in sorted(out.glob("*/report.json"))]


@pytest.mark.parametrize("unscaled", UNSCALED.values(), ids=UNSCALED)
@pytest.mark.parametrize("on_failure", ["repair", "skip"])
def test_no_update_is_made_of_gradients_that_lack_what_the_script_does_to_them(
    tmp_path, unscaled, on_failure
):
    update = "opt.step()"
    source = HEAD + LOOP.format(unscaled=unscaled, bad=SPOILT, update=update)
    ending, reports = run(tmp_path, source, on_failure=on_failure)
    without = LOOP.format(unscaled=unscaled, bad=SPOILT, update=f"if step != BAD: {update}")
    assert same(weights(ending), weights(run_script(tmp_path / "plain.py", HEAD + without)))
    (report,) = reports
    assert [one.code for one in report.diagnoses[:1]] == ["NS306"]
    assert report.diagnoses[0].confidence == "likely"
    lines = [source.splitlines()[one.line - 1].strip() for one in report.incident.rewritten_at]
    assert unscaled in lines
    assert report.audit[-1].action.kind == "skip"


def test_a_line_that_was_never_seen_to_write_is_not_named(tmp_path):
    source = HEAD.replace("BAD = 1024, 5", "BAD = 1, 5") + LOOP.format(
        unscaled="pass", bad=SPOILT, update="opt.step()"
    )
    _, (report,) = run(tmp_path, source)
    assert report.diagnoses[0].code == "NS306"
    assert report.incident.rewritten_at == ()


def test_what_replays_clean_and_was_not_written_to_is_made_anew(tmp_path):
    """Of a hook that counts its calls a replay knows nothing, and nobody wrote to gradients."""
    source = (
        HEAD.replace("1024, 5", "1, 5")
        + """
calls = []
def hook(gradient):
    calls.append(None)
    return gradient * float("nan") if len(calls) == 6 else gradient
net[2].weight.register_hook(hook)
"""
        + LOOP.format(unscaled="pass", bad="pass", update="opt.step()")
    )
    _, reports = run(tmp_path, source)
    (report,) = reports
    assert [one.code for one in report.diagnoses[:1]] == ["NS603"]
    assert report.incident.rewritten_at is None
    assert report.audit[-1].action.kind == "redo"


OVERFLOW = """
for step in range(9):
    x = torch.randn(8, 6)
    y = x.sum(-1, keepdim=True)
    x = x * 3e4 if step == BAD or step == 7 else x
    with torch.autocast("cpu", dtype=torch.float16):
        h = net[0](x)
        loss = F.mse_loss(net[2](F.layer_norm(h * h, (16,))).float(), y)
    opt.zero_grad()
    (SCALE * loss).backward()
    for p in PARAMETERS: p.grad.div_(SCALE)
    longest = max(float(p.grad.abs().max()) for p in PARAMETERS)
    if step >= BAD: lengths.append(longest)
    opt.step()
"""


def test_a_cure_that_is_proven_stays_on_from_the_next_update(tmp_path):
    source = HEAD + "lengths = []\n" + OVERFLOW
    ending, (report,) = run(tmp_path, source, allow=("bf16",))
    assert report.proof.verdict == "proven"
    assert report.audit[-1].action.kind == "adopt"
    assert "skipped" in report.audit[-1].outcome
    first, *rest = ending["lengths"]
    assert math.isnan(first)
    assert max(rest) < 0.1 * SCALE
    assert len(report.audit) == 1


def test_the_manual_interface_knows_it_too(tmp_path, monkeypatch):
    monkeypatch.setenv("NANSTOP_DIR", str(tmp_path / "out"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    before = None
    with nanstop.watch(net, optimizer) as watched:
        for step in range(6):
            x = torch.randn(8, 6)
            watched.step(lambda x: F.mse_loss(net(x), x.sum(-1, keepdim=True)), x)
            if step == 3:
                before = [p.detach().clone() for p in net.parameters()]
                for p in net.parameters():
                    p.grad /= torch.zeros(())
            watched.update()
            if step == 3:
                assert all(map(torch.equal, before, net.parameters()))
    (report,) = written(tmp_path / "out")
    assert report.diagnoses[0].code == "NS306"
    assert all(p.isfinite().all() for p in net.parameters())


NOISE = {
    "after its clip": (
        "",
        "nn.utils.clip_grad_norm_(PARAMETERS, 1.0)\n    noise(opt)\n    opt.step()",
    ),
    "in a hook": ("opt.register_step_pre_hook(noise)", "opt.step()"),
    "in a hook, after a clip": (
        "opt.register_step_pre_hook(noise)",
        "nn.utils.clip_grad_norm_(PARAMETERS, 1.0)\n    opt.step()",
    ),
    "in an optimizer around it": ("opt = Around(opt)", "opt.step()"),
    "in its own step": (
        "torch.optim.SGD(PARAMETERS, 0.05)\nopt = Own(PARAMETERS, 0.05)",
        "opt.step()",
    ),
}
NOISY = """
def noise(opt, *_):
    for p in opt.param_groups[0]["params"]:
        p.grad.add_(torch.randn_like(p) * 0.01 * float("inf" if step == BAD else 1))
class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
    def step(self):
        noise(self)
        self.inner.step()
class Own(torch.optim.SGD):
    def step(self):
        noise(self)
        super().step()
{made}
hooks = len(opt._optimizer_step_pre_hooks)
for step in range(9):
    x = torch.randn(8, 6)
    opt.zero_grad()
    F.mse_loss(net(x), x.sum(-1, keepdim=True)).backward()
    {update}
assert len(opt._optimizer_step_pre_hooks) == hooks
"""


@pytest.mark.parametrize(("made", "update"), NOISE.values(), ids=NOISE)
def test_what_is_written_once_they_were_looked_at_is_seen(tmp_path, made, update):
    source = HEAD + NOISY.format(made=made, update=update)
    ending, (report,) = run(tmp_path, source)
    assert report.diagnoses[0].code == "NS306"
    assert all(p.isfinite().all() for p in ending["PARAMETERS"])
    healthy = source.replace("step == BAD", "False")
    (tmp_path / "healthy").mkdir()
    watched, reports = run(tmp_path / "healthy", healthy)
    assert reports == []
    plain = run_script(tmp_path / "plain.py", healthy)
    assert same(weights(watched), weights(plain))
