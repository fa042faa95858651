"""Code that is shown is code that gives what the form gives on the failing step."""

import pytest
import torch
from torch.nn import functional as F  # noqa: F401 - by which the code is spelled

from e2e.forms.spoiled_step import hidden, large, shown, zero


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


def quotient_of_a_logarithm(v, b):
    rest = b["z"].abs().sum(-1)
    return ((v.exp().sum(-1) * rest).log() / rest * (rest > 0)).mean()


def root_of_a_share(v, b):
    count = b["m"].sum(-1)
    root = (v * b["m"]).square().sum(-1) / count
    return root.clamp(min=1e-6).sqrt().mean()


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
    assert "another form" not in text


def test_code_is_not_shown_that_does_less_than_the_form():
    incident, text = shown(quotient_of_a_logarithm, zero)
    assert incident.proof.verdict == "proven"
    assert incident.proof.typed == ()
    assert "in code" not in text


def of_both_sides(p, t):
    return -(t * torch.log(p) + (1 - t) * torch.log(1 - p)).mean()


def test_a_guard_that_is_typed_for_log_space_is_said_to_be_another_form():
    """The sigmoid is in another function than the logarithm; its clamp ends at -87."""

    def far(given):
        given["s"][1] = 3000.0

    incident, text = shown(lambda v, b: of_both_sides((v * b["s"]).sigmoid(), b["t"]), far)
    (atom,) = incident.proof.minimal
    assert (incident.proof.verdict, atom.remedy) == ("proven", "stable_form")
    assert [one.remedy for one in incident.proof.typed] == ["form"]
    _, _, code = text.partition("in code")
    assert "another form, which may end in another loss: give" in code.replace("\n", " ")
    assert "clamp(" in code


def of_steps_that_are_forbidden(v, b):
    moves = torch.zeros(3, 3).masked_fill(torch.arange(3) == b.get("n", 9), -torch.inf)
    alpha = v[:, :3]
    for _ in range(2):
        alpha = torch.logsumexp(alpha[:, :, None] + moves, 1)
    return torch.logsumexp(alpha, 1).mean()


def test_of_cures_that_hold_the_one_that_can_be_typed_comes_first():
    """Nothing is known that is typed for the guard of a logsumexp; for a fill it is."""
    incident, text = shown(of_steps_that_are_forbidden, none_may_come_to_the_last)
    proof = incident.proof
    assert (proof.verdict, proof.minimal[0].remedy) == ("proven", "finite_fill")
    assert 'masked_fill(torch.arange(3) == b.get("n", 9), -1e4)' in text
    assert any(one.atoms[0].remedy == "form" for one in proof.alternatives)


def none_may_come_to_the_last(given):
    given["n"] = torch.tensor(2)


def of_two_views(v, b):
    one, other = v * b["z"].mean(), v * b["z"].mean() * 2
    one = (one - one.mean(0)) / one.std(0)
    other = (other - other.mean(0)) / other.std(0)
    return (torch.diagonal(one.T @ other / len(one)) - 1).pow(2).sum()


def nothing_varies(given):
    given["z"][:] = 0.0


def test_two_lines_may_give_the_same_name():
    incident, text = shown(of_two_views, nothing_varies)
    assert len(incident.proof.typed) == 2
    assert "+ divisor = one.std(0)" in text
    assert "+ divisor = other.std(0)" in text
