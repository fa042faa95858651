"""A script whose updates change nothing has met an incident: with a folder, a cause and its line,
and help as code. What stands still for a while, and is meant to, is left in peace.
"""

import textwrap

import pytest
import torch

from e2e.scripts import run
from loop_scripts import investigated
from nanstop import cli
from nanstop.errors import TrainingStopped
from nanstop.records import Diagnosis, Report
from nanstop.report.announce import RunEnd
from nanstop.report.text.run_end import end_line
from nanstop.report.text.terminal import render

torch.set_num_threads(1)

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
opt = torch.optim.AdamW(net.parameters(), lr={lr})
{before}
for step in range(48):
    x, y = torch.randn(12, 8), torch.randint(4, (12,))
"""
PLAIN = """
opt.zero_grad()
loss = F.cross_entropy(net(x), y)
{scaled}
loss.backward()
{clip}
opt.step()
{after}
"""
CLIP = "nn.utils.clip_grad_norm_(net.parameters(), 1.0)"
BY_HAND = """
norm = sum(p.grad.square().sum() for p in net.parameters()).sqrt()
for p in net.parameters():
    p.grad.mul_(1.0 / norm)
"""


def script(body, *, before="", lr=1e-2):
    head = HEAD.format(lr=lr, before=textwrap.dedent(before))
    return head + textwrap.indent(textwrap.dedent(body), "    ")


def plain(*, scaled="", clip="", after="", **around):
    return script(PLAIN.format(scaled=scaled, clip=clip, after=after), **around)


FAULTS = {
    "clipped to 0": (plain(clip=CLIP.replace("1.0", "0.0")), 0, "clip_grad_norm_(", "1.0)"),
    "a norm beyond float32": (
        plain(scaled="loss = loss * 1e22", clip=CLIP),
        0,
        CLIP,
        "loss = loss",
    ),
    "from update 24 on": (
        plain(scaled="loss = loss * (1e22 if step >= 24 else 1.0)", clip=CLIP),
        25,
        CLIP,
        "",
    ),
    "by hand, from update 24 on": (
        plain(scaled="loss = loss * (1e22 if step >= 24 else 1.0)", clip=BY_HAND),
        25,
        "norm = sum(",
        "",
    ),
    "no gradient": (
        plain(
            scaled="loss = (net(x).detach() * opt_free).sum()",
            before="opt_free = nn.Parameter(torch.ones(4))",
        ),
        0,
        "",
        "",
    ),
    "emptied behind the backward": (plain(clip="opt.zero_grad()"), 0, "opt.zero_grad()", ""),
    "a loss times 0": (plain(scaled="loss = 0.0 * loss"), 3, "loss = 0.0 * loss", ""),
    "behind a sign": (
        plain(scaled="loss = (net(x).sign() - F.one_hot(y, 4)).square().mean()"),
        3,
        "",
        "",
    ),
    "a schedule of zeros": (
        plain(
            before="sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 0.0)",
            after="sched.step()",
        ),
        0,
        "sched = ",
        "",
    ),
}


@pytest.mark.parametrize(("source", "step", "line", "typed"), FAULTS.values(), ids=FAULTS)
def test_it_is_an_incident_with_its_cause(tmp_path, source, step, line, typed):
    _, news = investigated(tmp_path / "script.py", source)
    (report,) = [one for one in news if isinstance(one, Report)]
    assert not any(isinstance(one, Diagnosis) for one in news)
    assert report.incident.at.step == step
    best, folder = report.diagnoses[0], tmp_path / "script" / report.incident.id
    assert best.trains_nothing
    assert best.confidence != "possible"
    assert line in " ".join(best.lines)
    assert best.where.startswith("script.py:") == bool(line)
    assert (folder / "report.json").is_file()
    said = render(report)
    assert f"error[{best.code}]: " in said
    assert "help: " in said
    assert f"  + {typed}" in said or not typed or f"{typed}\n" in said
    (end,) = [one for one in news if isinstance(one, RunEnd)]
    assert f"48 steps watched, 1 incident ({best.code})" in end_line(end)


def test_it_stops_where_the_policy_is_to_stop(tmp_path):
    with pytest.raises(TrainingStopped, match="NS307"):
        investigated(tmp_path / "script.py", FAULTS["a norm beyond float32"][0], on_failure="stop")


FREEZE = """
def freeze(net):
    for p in net.parameters():
        p.grad.zero_()
"""
ALIKE = {
    "a fill": "for p in net.parameters(): p.grad.zero_()",
    "a product": "for p in net.parameters(): p.grad *= 0.0",
    "a function": "freeze(net)",
}


@pytest.mark.parametrize("empties", ALIKE.values(), ids=ALIKE)
def test_what_empties_gradients_in_each_step_alike_is_told_after_three_updates(tmp_path, empties):
    source = plain(clip=empties, before=FREEZE).replace("range(48)", "range(4)")
    _, news = investigated(tmp_path / "script.py", source)
    (report,) = [one for one in news if isinstance(one, Report)]
    assert report.diagnoses[0].code == "NS307"
    assert "3 updates" in report.diagnoses[0].cause


def test_a_hook_that_gives_zeros_is_told_after_three_updates(tmp_path):
    hooks = "for p in net.parameters(): p.register_hook(lambda g: torch.zeros_like(g))"
    source = plain(before=hooks).replace("range(48)", "range(4)")
    _, news = investigated(tmp_path / "script.py", source)
    (report,) = [one for one in news if isinstance(one, Report)]
    assert report.diagnoses[0].where == "script.py:9"


def test_a_rate_of_0_that_nothing_sets_is_told_after_three_updates(tmp_path):
    (tmp_path / "script.py").write_text(plain(lr=0.0).replace("range(48)", "range(4)"))
    found = run(tmp_path, "script.py")  # a process of its own: no module beside it sets a rate
    assert "error[NS113]: out of range: a learning rate of 0" in found.err
    assert "--> script.py:8" in found.err


MEANT = {
    "a first rate of 0": plain(
        before="sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(n / 12, 1.0))",
        after="sched.step()",
        clip=CLIP,
    ),
    "half of the net is frozen": plain(before="net[0].requires_grad_(False)", clip=CLIP),
    "a window of four": script(
        """
        (F.cross_entropy(net(x), y) / 4).backward()
        if step % 4 == 3:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        """
    ),
    "a scaler finds its scale": script(
        """
        opt.zero_grad()
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        """,
        before="scaler = torch.amp.GradScaler('cpu', init_scale=2.0**127)",
    ),
    "two that take turns": script(
        """
        real, made = torch.randn(12, 4), net(x)
        if step % 2:
            other.zero_grad()
            loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(real)).mean()
            loss.backward()
            other.step()
        else:
            opt.zero_grad()
            F.softplus(-critic(made)).mean().backward()
            opt.step()
        """,
        before="""
        critic = nn.Linear(4, 1)
        other = torch.optim.Adam(critic.parameters(), lr=1e-3)
        """,
    ),
    "values before the first reward": plain(
        before="for p in net.parameters(): nn.init.zeros_(p)",
        scaled="loss = (net(x) - float(step >= 30)).square().mean()",
        clip=CLIP,
    ),
    "advantages before the first reward": plain(
        scaled="loss = (F.cross_entropy(net(x), y, reduction='none') * (step >= 40)).mean()",
        clip=CLIP,
    ),
    "one norm beyond float32": plain(
        scaled="loss = loss * (1e22 if step in (3, 24, 25) else 1.0)", clip=CLIP
    ),
    "emptied under a condition": plain(clip="step < 12 and freeze(net)", before=FREEZE),
    "emptied by a hook that is switched off": plain(
        before="""
        still = [True]
        for p in net.parameters(): p.register_hook(lambda g: g * (not still[0]))
        """,
        after="still[0] = step < 12",
    ),
    "emptied by hooks that are removed": plain(
        before="hooks = [p.register_hook(torch.zeros_like) for p in net.parameters()]",
        after="if step == 12: [hook.remove() for hook in hooks]",
    ),
    "left behind a condition": script(
        """
        opt.zero_grad()
        if step >= 12:
            F.cross_entropy(net(x), y).backward()
            opt.step()
            continue
        F.cross_entropy(net(x), y).backward()
        opt.zero_grad()
        opt.step()
        """
    ),
    "a rate of 0 that is set later": plain(
        lr=0.0, after="opt.param_groups[0]['lr'] = 0.0 if step < 12 else 1e-3"
    ),
    "a weight of 0 beside advantages that are 0": plain(
        scaled="loss = (F.cross_entropy(net(x), y, reduction='none') * (step >= 40)).mean() "
        "+ 0.0 * net(x).square().mean()"
    ),
    "a hinge that is content": plain(
        scaled="loss = torch.clamp(net(x).mean() - 9.0 + 30 * (step >= 20), 0)",
    ),
    "a coefficient that begins at 0": plain(scaled="loss = loss * (0 if step < 20 else 1)"),
    "held still for the first updates": plain(
        clip="for p in net.parameters(): p.grad.mul_(float(step >= 12))", lr=1e-3
    ),
}


@pytest.mark.parametrize("source", MEANT.values(), ids=MEANT)
def test_what_stands_still_for_a_while_is_left_in_peace(tmp_path, source):
    _, news = investigated(tmp_path / "script.py", source)
    assert not [one for one in news if isinstance(one, Report | Diagnosis)]


def test_an_optimizer_whose_parameters_hooks_train_is_left_in_peace(tmp_path):
    source = script(
        """
        F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()
        """,
        before="""
        inside = {p: torch.optim.SGD([p], lr=1e-2) for p in net.parameters()}
        def update(p):
            inside[p].step()
            inside[p].zero_grad()
        for p in inside: p.register_post_accumulate_grad_hook(update)
        """,
    )
    _, news = investigated(tmp_path / "script.py", source)
    assert [one.code for one in news if isinstance(one, Diagnosis)] == ["NS116"]
    assert not [one for one in news if isinstance(one, Report)]


def test_a_fix_of_it_is_typed_and_nothing_is_to_be_allowed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = plain(scaled="loss = loss * 1e22", clip=CLIP)
    investigated(tmp_path / "script.py", source)
    assert cli.main(["fix", str(tmp_path / "script")]) == cli.OK
    said = capsys.readouterr().out
    assert "-    loss = loss * 1e22" in said
    assert "leave the code as it is" not in said
