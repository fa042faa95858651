"""Exponentials that leave their format, and logarithms of 0: kept within a bound that somebody has
to choose, which is proven where the loss does not hang on it.
"""

from pathlib import Path

import pytest
import torch

from e2e.forms.spoiled_step import investigated, shown
from nanstop.commands.fix.fix import fix
from nanstop.records.line_forms import typed_cure


def of_a_clipped_ratio(v, b):
    ratio = torch.exp(v - b["u"])
    return -torch.min(ratio * b["t"], ratio.clamp(0.8, 1.2) * b["t"]).mean()


def of_an_estimate(v, b):
    ratio = torch.exp(b["u"] - v)
    return (ratio - (b["u"] - v) - 1.0).mean() + v.square().mean()


def of_a_scale(v, b):
    return ((v * torch.exp(b["s"] * v.abs())) - b["u"]).square().mean()


def far_below(given):
    given["u"][1], given["t"][1] = -150.0, 1.0


def far_above(given):
    given["u"][:] = 120.0


def large(given):
    given["s"][1] = 2000.0


def test_a_ratio_that_is_clipped_behind_it_hangs_on_no_bound():
    incident, text = shown(of_a_clipped_ratio, far_below)
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.value) == ("proven", "bounded")
    assert 'ratio = torch.exp((v - b["u"]).clamp(max=20))' in text
    assert "yours to choose" not in text


def test_a_bound_that_the_loss_hangs_on_is_shown_and_not_proven():
    incident, text = shown(of_an_estimate, far_above)
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.value) == ("plausible", "bounded")
    assert 'ratio = torch.exp((b["u"] - v).clamp(max=20))' in text
    assert "the bound is yours to choose" in text


def test_a_bound_is_typed_beside_a_sample_that_is_left_out():
    incident, text = shown(of_a_scale, large)
    assert incident.proof.verdict == "isolated"
    assert {atom.remedy for atom in incident.proof.minimal} == {"drop_sample"}
    assert {atom.value for atom in typed_cure(incident.proof)} == {"bounded"}
    left_out, clamped = text.index("leave out sample 1"), text.index("or clamp the argument at")
    assert left_out < clamped < text.index('torch.exp((b["s"] * v.abs()).clamp(max=20))')
    assert "usual cure" not in text


def of_inverse_counts(v, b):
    weight = 8 / torch.bincount(b["t"][:, 0].long(), minlength=4).float()
    return (weight * (v.mean() - 0.1 * torch.arange(4)).square()).sum()


def of_whole_numbers(v, b):
    scale = torch.log(torch.arange(8)) / 4
    return ((v * scale) - b["u"]).square().mean()


def one_kind(given):
    given["t"][:] = 1.0


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (of_inverse_counts, 'bincount(b["t"][:, 0].long(), minlength=4).float().clamp(min=1)'),
        (of_whole_numbers, "torch.log(torch.arange(8).clamp(min=1)) / 4"),
    ],
)
def test_a_count_of_0_is_typed_as_1(body, line):
    _, text = shown(body, one_kind)
    assert line in text


def of_shares(v, b):
    return -torch.log(b["s"] * (1.0 + v)).mean()


def negative(given):
    given["s"][1] = -1.0


def below_0_by_rounding(given):
    given["s"][1] = -1e-12


@pytest.mark.parametrize(
    ("spoil", "verdict"), [(negative, {"plausible", "isolated"}), (below_0_by_rounding, {"proven"})]
)
def test_a_bound_is_proven_for_what_rounding_took_below_0_and_no_further(spoil, verdict):
    incident, _ = shown(of_shares, spoil)
    assert {atom.value for atom in typed_cure(incident.proof)} == {"bounded"}
    assert incident.proof.verdict in verdict


def test_what_is_only_plausible_is_not_applied():
    watch, _ = investigated(of_an_estimate, far_above, allow=("form",))
    (incident,) = watch.incidents
    assert incident.audit[-1].action.kind == "skip"


def of_an_inverse(v, b):
    wanted = torch.atanh(b["u"].tanh().where(b["m"], b["t"]))
    return (v - wanted).square().mean()


def of_normal_scores(v, b):
    return (v - torch.special.ndtri(b["t"].where(~b["m"], b["u"].sigmoid()))).square().mean()


def of_logits(v, b):
    return ((v - torch.logit(b["t"].where(~b["m"], b["u"].sigmoid()))) * b["m"]).square().mean()


def at_the_end(given):
    given["m"][1, 2], given["t"][1, 2] = False, 1.0


@pytest.mark.parametrize(
    ("loss", "typed"),
    [
        (
            of_an_inverse,
            'torch.atanh(b["u"].tanh().where(b["m"], b["t"]).clamp(-1 + 1e-6, 1 - 1e-6))',
        ),
        (
            of_normal_scores,
            'torch.special.ndtri(b["t"].where(~b["m"], b["u"].sigmoid()).clamp(1e-6, 1 - 1e-6))',
        ),
    ],
)
def test_how_near_to_the_end_of_its_interval_a_function_is_asked_is_chosen(loss, typed):
    incident, text = shown(loss, at_the_end)
    (atom,) = typed_cure(incident.proof)
    assert (incident.proof.verdict, atom.value) == ("isolated", "bounded")
    assert incident.diagnoses[0].code == "NS204"
    assert "of 1" in incident.diagnoses[0].cause
    assert "where it is infinite" in incident.diagnoses[0].cause
    assert typed in text
    assert "the bound is yours to choose" in text
    guards = [one for one in incident.proof.tried if typed_as(one.atoms) == "guarded"]
    assert guards


def test_a_pole_that_the_loss_leaves_out_hangs_on_no_bound():
    incident, text = shown(of_logits, at_the_end)
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.value) == ("proven", "bounded")
    assert ".clamp(1e-6, 1 - 1e-6))) * b[" in text


def of_large_rates(v, b):
    rate = torch.exp(b["s"] * (v + 25.0))
    return torch.log(1.0 + rate.sum(-1)).mean()


def test_a_bound_that_steps_that_pass_are_beyond_is_no_cure():
    watch, _ = investigated(of_large_rates, large)
    (incident,) = watch.incidents
    assert all(atom.value != "bounded" for atom in incident.proof.minimal)
    said = {trial.message for trial in incident.proof.tried if typed_as(trial.atoms) == "bounded"}
    assert said == {"steps that pass have numbers beyond the bound"}


def typed_as(atoms):
    return atoms[0].value if len(atoms) == 1 else ""


@pytest.mark.parametrize(
    ("loss", "spoil", "proof", "allow"),
    [
        (of_a_clipped_ratio, far_below, "proven", ("form",)),
        (of_an_estimate, far_above, "plausible", ()),
        (of_a_scale, large, "plausible", ()),
    ],
)
def test_only_what_a_run_applies_is_had_by_allowing_it(capsys, loss, spoil, proof, allow):
    investigated(loss, spoil)
    folder = capsys.readouterr().err.partition("`nanstop fix ")[2].partition("`")[0]
    found = fix(Path(folder))
    assert (found.proof, found.allow) == (proof, allow)
