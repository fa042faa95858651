"""An infinity that the program writes, and that comes to be multiplied by 0: a finite number in its
place is proven where it makes no difference which, and nowhere else.
"""

import ast

import pytest
import torch
from torch.nn import functional as F

from e2e.forms.spoiled_step import WIDTH, as_it_is, investigated, shown
from nanstop.rewrite.operations import infinity_of
from nanstop.rewrite.source import Source


def one_less(given):
    """One choice of one row is not allowed."""
    given["m"][1, 2] = False


def entropy(v, b):
    scores = v.masked_fill(~b["m"], float("-inf"))
    logp = scores.log_softmax(-1)
    return (logp.exp() * logp).sum(-1).mean()


def entropy_by_where(v, b):
    scores = torch.where(b["m"], v, torch.tensor(float("-inf")))
    logp = scores.log_softmax(-1)
    return (logp.exp() * logp).sum(-1).mean()


def entropy_by_index(v, b):
    scores = v + 0.0
    scores[~b["m"]] = -torch.inf
    logp = scores.log_softmax(-1)
    return (logp.exp() * logp).sum(-1).mean()


def entropy_by_item(v, b):
    scores = v + 0.0
    if not b["m"].all():
        scores[1, 2] = float("-inf")
    logp = scores.log_softmax(-1)
    return (logp.exp() * logp).sum(-1).mean()


def reverse_kl(v, b):
    """Finite, as its NaN are made 0, and its gradient is not."""
    wanted = b["z"].log_softmax(-1).masked_fill(~b["m"], -torch.inf)
    logp = v.log_softmax(-1)
    each = torch.nan_to_num(logp.exp() * (logp - wanted), posinf=0.0)
    return (each * b["m"]).sum(-1).mean()


def shifted(v, b):
    """How far scores are above the least of them, which is not allowed."""
    scores = v.masked_fill(~b["m"], float("-inf"))
    return (scores - scores.amin(-1, keepdim=True)).mean()


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (entropy, "NS204"),
        (entropy_by_where, "NS204"),
        (entropy_by_index, "NS204"),
        (entropy_by_item, "NS204"),
        (reverse_kl, "NS304"),
    ],
)
def test_a_number_of_which_nothing_depends_is_proven(loss, code):
    incident, text = shown(loss, one_less)
    (atom,) = incident.proof.minimal
    assert (incident.diagnoses[0].code, incident.proof.verdict) == (code, "proven")
    assert atom.remedy == "finite_fill"
    assert incident.audit[-1].action.kind == "skip"
    assert "the program writes" in text
    assert "-1e4" in text.partition("in code:")[2]
    assert incident.proof.typed in (None, incident.proof.minimal)  # None: what writes in place


def test_it_is_applied_where_it_is_allowed():
    watch, net = investigated(entropy, one_less, allow=("finite_fill",))
    (incident,) = watch.incidents
    assert incident.audit[-1].action.kind == "redo"
    assert all(p.isfinite().all() for p in net.parameters())


def smoothed(v, b):
    """What is asked of a choice that is not allowed has no finite loss."""
    scores = v.masked_fill(~b["m"], float("-inf"))
    return F.cross_entropy(scores, b["y"], label_smoothing=0.1)


@pytest.mark.parametrize("loss", [shifted, smoothed])
def test_where_the_loss_depends_on_the_number_none_is_proven(loss):
    incident, text = shown(loss, one_less)
    assert incident.diagnoses[0].code == "NS204"
    assert not any(atom.remedy == "finite_fill" for atom in incident.proof.minimal)
    assert "-1e4" not in text


def one_less_and_dropped(given):
    """One choice of one row is not allowed, and its score is left out besides."""
    one_less(given)
    given["z"][1, 2] = 0.0


def dropped(v, b):
    """Scores are left out after some were hidden: 0 times what hides hides no more."""
    scores = v.masked_fill(~b["m"], float("-inf")) * (b["z"] != 0)
    return F.cross_entropy(scores, b["y"])


def test_a_number_that_hides_no_more_is_not_proven():
    incident, text = shown(dropped, one_less_and_dropped)
    assert incident.diagnoses[0].code == "NS204"
    assert not any(atom.remedy == "finite_fill" for atom in incident.proof.minimal)
    assert "-1e4" not in text


def weighed(v, b):
    """The same 0, times a log-probability that is counted with that weight alone."""
    logp = v.masked_fill(~b["m"], float("-inf")).log_softmax(-1)
    return -(logp * (b["z"] != 0)).mean()


def test_a_number_that_counts_nothing_is_proven():
    incident, text = shown(weighed, one_less_and_dropped)
    assert incident.proof.verdict == "proven"
    assert [atom.remedy for atom in incident.proof.minimal] == ["finite_fill"]
    assert "-1e4" in text.partition("in code:")[2]


BANNED = torch.zeros(WIDTH)
BANNED[2] = float("-inf")
RATES = torch.ones(WIDTH)
RATES[1] = float("inf")


def padded_ratio(v, b):
    """What is not read has no log-probability, and is left out of the sum once it is too late."""
    old = v.detach().masked_fill(~b["m"], float("-inf"))
    return ((v - old).exp() * b["m"]).mean()


def banned(v, b):
    """The entropy of choices of which one is banned by a constant."""
    logp = (v + BANNED).log_softmax(-1)
    return (logp.exp() * logp).sum(-1).mean()


def unmet(v, b):
    """An infinite weight of what no sample has."""
    t = b["t"] * RATES.isfinite()
    return F.binary_cross_entropy_with_logits(v, t, pos_weight=RATES)


@pytest.mark.parametrize(
    ("loss", "spoil", "remedy", "typed"),
    [
        (padded_ratio, one_less, "finite_fill", 'masked_fill(~b["m"], 0.0)'),
        (banned, as_it_is, "finite_constant", "BANNED.clamp(min=-1e4)"),
        (unmet, as_it_is, "finite_constant", "RATES.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)"),
    ],
)
def test_what_is_left_out_later_is_proven_with_a_number(loss, spoil, remedy, typed):
    kept = BANNED.clone(), RATES.clone()
    incident, text = shown(loss, spoil)
    assert incident.proof.verdict == "proven"
    assert [atom.remedy for atom in incident.proof.minimal] == [remedy]
    assert typed in text.partition("in code:")[2]
    assert torch.equal(BANNED, kept[0])
    assert torch.equal(RATES, kept[1])


def met(v, b):
    """An infinite weight of what samples have."""
    return F.binary_cross_entropy_with_logits(v, b["t"], pos_weight=RATES)


def test_a_weight_that_is_met_has_no_number():
    incident, text = shown(met, as_it_is)
    assert "`RATES` holds +Inf x 1; it was so before the step" in text
    assert incident.proof.verdict == "none_found"
    assert "nan_to_num" not in text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('float("-inf")', -1.0),
        ("-float('inf')", -1.0),
        ("float(' Infinity')", 1.0),
        ("-math.inf", -1.0),
        ("torch.inf", 1.0),
        ("float('nan')", None),
        ("float(x)", None),
        ("-1e9", None),
        ("other.inf", None),
    ],
)
def test_how_an_infinity_is_spelled(text, value):
    source = Source(f"import math, torch, other\ny = {text}\n")
    node = source.tree.body[-1].value
    assert isinstance(node, ast.expr)
    found = infinity_of(source, node)
    assert (found is None) == (value is None)
    assert found is None or found == value * float("inf")


def volume(v, b):
    """The logarithm of a determinant below 0: it is torch that writes the NaN."""
    return -torch.logdet(-torch.eye(3) * v[0, 0].exp()) + v.mean()


def test_a_number_that_the_line_does_not_spell_is_not_said_to_be_of_the_program():
    incident, text = shown(volume, as_it_is)
    assert incident.diagnoses[0].code == "NS204"
    assert "nan that the line does not spell reaches the loss" in text


def over(v, b):
    return F.cross_entropy(v, b["y"], weight=RATES, label_smoothing=0.1)


def test_what_a_line_makes_nan_of_is_the_constant():
    incident, text = shown(over, as_it_is)
    assert incident.diagnoses[0].code == "NS506"
    assert "`RATES` holds +Inf x 1; it was so before the step" in text
