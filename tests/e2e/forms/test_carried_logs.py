"""Loops that carry probabilities or weights from round to round: their logarithms are proven on the
failing step, and typed as a person carries them.
"""

import pytest
import torch

from e2e.forms.spoiled_step import ROWS, as_it_is, shown

MOVES = torch.linspace(-1.0, 1.0, 64).view(8, 8)


def forward_sums(v, b):
    emit = v * 40
    alpha = torch.exp(emit)
    for _ in range(6):
        alpha = (alpha.unsqueeze(2) * torch.exp(MOVES)).sum(1) * torch.exp(emit)
    return torch.log(alpha.sum(1)).mean()


def forward_products(v, b):
    emit = v * 40
    alpha = torch.exp(emit)
    for _ in range(6):
        alpha = (alpha @ torch.exp(MOVES)) * torch.exp(emit)
    return torch.log(alpha.sum(1)).mean()


def scaled(v, b):
    cost = (v[:, None] - b["u"][None]).square().sum(-1)
    kernel = torch.exp(-cost / 0.01)
    right = torch.ones(ROWS)
    for _ in range(4):
        left = 1.0 / (kernel @ right)
        right = 1.0 / (kernel.t() @ left)
    return (left[:, None] * kernel * right[None, :] * cost).sum()


def carried_in_a_closure(v, b):
    emit = v * 40
    alpha = torch.exp(emit)
    for _ in range(6):
        alpha = alpha * torch.exp(emit)

    def total():
        return alpha.sum(1)

    return torch.log(total()).mean()


CODE = {
    forward_sums: (
        "log_alpha = emit",
        "log_alpha = torch.logsumexp(log_alpha.unsqueeze(2) + MOVES, 1) + emit",
        "return torch.logsumexp(log_alpha, 1).mean()",
    ),
    forward_products: (
        "log_alpha = torch.logsumexp(log_alpha.unsqueeze(-1) + MOVES, -2) + emit",
        "return torch.logsumexp(log_alpha, 1).mean()",
    ),
    scaled: (
        "log_kernel = -cost / 0.01",
        "log_left = -torch.logsumexp(log_kernel + log_right, -1)",
        "log_right = -torch.logsumexp(log_kernel.t() + log_left, -1)",
        "(torch.exp(log_left[:, None] + log_kernel + log_right[None, :]) * cost).sum()",
    ),
}


@pytest.mark.parametrize("loss", CODE)
def test_logarithms_are_carried_and_their_code_was_run(loss):
    incident, text = shown(loss, as_it_is)
    assert [atom.remedy for atom in incident.proof.minimal] == ["stable_form"]
    (typed,) = incident.proof.typed
    assert typed.value.startswith("carried")
    assert "not run" not in text
    for line in CODE[loss]:
        assert line in text


def test_what_another_function_reads_is_carried_as_it_is():
    incident, text = shown(carried_in_a_closure, as_it_is)
    assert incident.proof.typed is None
    assert "log_alpha" not in text
