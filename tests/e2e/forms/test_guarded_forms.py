"""Lines with a guard: proven on the failing step, in force where they are allowed."""

import pytest
import torch
from torch.nn import functional as F

from e2e.forms.spoiled_step import WIDTH, as_it_is, hidden, investigated, large, shown, zero

TEXTS, LENGTHS = torch.tensor([[3, 3], [3, 4]]), torch.tensor([2, 2])


def unlabelled(given):
    given["y"][1] = -100


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
    "logarithm": (lambda v, b: (v * b["z"]).abs().sum(-1).log().mean(), zero),
    "logarithm times 0": (
        lambda v, b: (b["z"] * (b["z"].abs() / v.exp()).log()).sum(-1).mean(),
        zero,
    ),
    "sine over its angle, times 0": (
        lambda v, b: (v * b["z"].sin() * b["z"].sin() / b["z"]).sum(),
        zero,
    ),
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


def test_code_that_was_not_run_is_told_from_code_that_was():
    incident, text = shown(*GUARDED["largest"])  # a lambda in a dict, beside others
    assert incident.proof.typed is None
    assert "(not run on this step)" in text
