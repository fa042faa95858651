"""What a form is proven by: other rows, the step before, float64, each line alone."""

import math

import pytest
import torch

from e2e.forms.spoiled_step import WIDTH, hidden, investigated, shown, zero
from nanstop.report.text.terminal import render


def of_two_lines(v, b):
    root = (v * b["z"]).square().sum(-1, keepdim=True).sqrt()
    return (v * b["z"] / root).sum()


def test_forms_of_two_lines_are_found_one_after_the_other():
    watch, _ = investigated(of_two_lines, zero)
    (incident,) = watch.incidents
    atoms = incident.proof.minimal
    assert (incident.proof.verdict, {atom.remedy for atom in atoms}) == ("proven", {"form"})
    assert len({atom.target for atom in atoms}) == 2


def of_a_harmonic_mean(v, b):
    p, target = v.sigmoid(), b["m"].float()
    precision = (p * target).sum(0) / p.sum(0)
    recall = (p * target).sum(0) / target.sum(0)
    return 1 - (2 * precision * recall / (precision + recall)).mean()


def test_forms_of_one_kind_come_before_forms_of_two():
    def of_no_class(given):
        given["m"][:, 0] = False

    watch, _ = investigated(of_a_harmonic_mean, of_no_class)
    (incident,) = watch.incidents
    assert {atom.remedy for atom in incident.proof.minimal} == {"form"}
    assert incident.proof.typed == incident.proof.minimal


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


def test_a_batch_without_a_healthy_row_is_judged_by_the_one_before():
    def nothing_kept(given):
        given["m"][:] = False

    watch, _ = investigated(lambda v, b: (v * b["m"]).sum() / b["m"].sum(), nothing_kept)
    (incident,) = watch.incidents
    assert incident.proof.verdict == "proven"
    assert incident.proof.minimal[0].remedy == "form"


def test_a_guard_under_which_a_first_step_teaches_nothing_is_not_proven():
    """A huber loss by a threshold of 0: each of its numbers is 0, and so is what they are by."""
    threshold = [0.0]

    def of_huber(v, b):
        far = (v - b["u"]).abs()
        bent = threshold[0] * (far - 0.5 * threshold[0])
        return (torch.where(far <= threshold[0], 0.5 * far**2, bent) / threshold[0]).mean()

    watch, _ = investigated(of_huber, lambda _given: None)
    first = watch.incidents[0]
    assert [atom.value for atom in first.proof.minimal] == ["guarded"]
    assert first.proof.verdict == "plausible"


def test_a_temperature_of_0_proves_no_form():
    tau = [1.0]

    def cold(_given):
        tau[0] = 0.0

    watch, _ = investigated(lambda v, _: (v / tau[0]).softmax(-1)[:, 0].mean(), cold)
    assert watch.incidents
    assert all(incident.proof is None for incident in watch.incidents)


def of_a_scale(v, b):
    scale = (v * 0.0).sum(-1) + b["z"].abs().sum(-1)
    z = b["u"].sum(-1) / scale
    return (scale * z * torch.erf(z) + v.square().mean(-1)).mean()


def of_sines(v, b):
    angle = b["z"].square().sum(-1, keepdim=True)
    share = torch.sin(math.pi * angle) / (math.pi * angle)
    return (v * share).square().mean()


def of_ratios(v, b):
    return (b["z"].abs().sum(-1) / v.exp().sum(-1)).log().square().mean()


def test_a_logarithm_of_a_ratio_with_0_in_the_data_proves_no_guard():
    watch, _ = investigated(of_ratios, zero)
    (incident,) = watch.incidents
    assert incident.proof is not None
    assert incident.proof.verdict != "proven"


BEYOND = {
    "root": lambda c: c.sqrt(),
    "power": lambda c: c**1.5,
}


@pytest.mark.parametrize("named", BEYOND)
def test_a_number_far_below_0_has_no_root_that_could_be_proven(named):
    """Nothing says that 0 was meant: with another number it is another loss."""

    def loss(v, b):
        left = b["z"].abs().mean(-1) - (b["s"][:, 0] - 1)
        return (v.mean(-1) - BEYOND[named](left)).square().mean()

    def below(given):
        given["s"][1] = 5.0

    watch, _ = investigated(loss, below)
    (incident,) = watch.incidents
    assert incident.diagnoses[0].code == "NS204"
    assert incident.proof.verdict != "proven"


def test_a_number_that_rounding_took_below_0_has_the_root_of_0():
    def below(given):
        given["z"][1] = 0.0

    def loss(v, b):
        left = b["z"].square().mean(-1) - 1e-13 * (b["z"] == 0).all(-1)
        return (v.mean(-1) + left.sqrt()).mean()

    watch, _ = investigated(loss, below)
    (incident,) = watch.incidents
    assert incident.proof.verdict == "proven"


@pytest.mark.parametrize(
    ("loss", "name"), [(of_a_scale, "scale"), (of_sines, "angle")], ids=["scale", "sines"]
)
def test_a_value_that_has_a_limit_is_computed_next_to_it(loss, name):
    """0 times what is infinite, and 0 / 0: what is put there is not 0."""
    incident, text = shown(loss, zero)
    (atom,) = incident.proof.minimal
    assert (atom.remedy, atom.value) == ("form", "off_zero")
    assert incident.proof.verdict == "proven"
    assert incident.proof.typed == (atom,)
    assert f"{name}_off_zero = {name}.masked_fill({name} == 0, 1e-6)" in text


def of_weighed_classes(v, b):
    kept = v.softmax(-1) * b["m"]
    weights = 1 / b["m"].float().sum(1) ** 2
    return (
        1 - (weights * (kept * b["t"]).sum(1)).sum() / (weights * (v.exp() + b["t"]).sum(1)).sum()
    )


def test_a_count_comes_no_nearer_to_0():
    """With a weight of 1 / 1e-12 for what is absent the loss has a limit: nothing else counts."""
    incident, text = shown(of_weighed_classes, hidden)
    assert incident.diagnoses[0].code == "NS205"
    assert incident.proof.verdict in ("plausible", "isolated")
    assert all(atom.value != "off_zero" for atom in incident.proof.minimal)
    assert '(b["m"].float().sum(1) ** 2).clamp(min=1)' in text


def of_one_logarithm(v, b):
    share = torch.where(b["m"], v.exp(), (v - 9.0).relu())
    return -share.log().mean() + 20.0


def test_a_logarithm_of_few_numbers_that_the_model_makes_0_has_its_guard():
    def of_one(given):
        given["m"][1, 0] = False

    watch, _ = investigated(of_one_logarithm, of_one)
    (incident,) = watch.incidents
    assert incident.proof.minimal[0].value == "bounded"


def of_a_signal(v, b):
    share = (v * b["z"]).sum(-1, keepdim=True) / b["z"].square().sum(-1, keepdim=True)
    part = (share * b["z"]).square().sum(-1)
    return -torch.log10(part / (v - share * b["z"]).square().sum(-1)).mean()


def test_a_guard_behind_another_has_the_value_that_its_format_has():
    watch, _ = investigated(of_a_signal, zero)
    (incident,) = watch.incidents
    assert incident.proof.verdict == "proven"
    assert [atom.value for atom in incident.proof.minimal] == ["guarded", "guarded:log10"]


def of_sure_answers(v, b):
    logp = -torch.nn.functional.softplus(-(1 + v.square().mean(-1)) * b["s"][:, 0])
    return -((1 - logp.exp()) ** 0.5 * logp).mean()


def all_sure(given):
    given["s"][:] = 40.0


def test_what_is_typed_where_no_gradient_is_left_to_compare():
    """A clamp leaves a root of its bound, 1e-6, where a guard leaves 0."""
    watch, _ = investigated(of_sure_answers, all_sure)
    (incident,) = watch.incidents
    assert incident.proof.typed == incident.proof.minimal
    assert ".clamp(min=1e-12) ** 0.5" in render(incident)
