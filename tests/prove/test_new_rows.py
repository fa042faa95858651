"""Rows of a tied token table made anew: what they may change in samples that do not read them."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep, FnView
from nanstop.prove.bad_samples import changes_new_outputs_only
from nanstop.prove.failing_step import FailingStep
from nanstop.prove.reference.exact import ExactRuns
from nanstop.records import Atom

ROWS, WIDTH, NEW = 40, 6, (38, 39)
MEAN = Atom(remedy="init_rows", target="table.weight", value="mean 38-39")


class Tied(nn.Module):
    """Predicts each next token; its last feature is 0 whatever it reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.table.weight[list(NEW)] = 0.0
            self.inner.weight[-1] = 0.0

    def forward(self, ids):
        return torch.tanh(self.inner(self.table(ids))) @ self.table.weight.T


class Speaking(FnView):
    def logits(self, ids):
        with torch.no_grad():
            return self.root(ids)


@contextmanager
def rows(model, values):
    """Have other rows inside; ``values`` makes them of the table and the model."""
    table = model.table.weight.data
    before = table.clone()
    table[list(NEW)] = values(model, before[: NEW[0]])
    try:
        yield
    finally:
        table.copy_(before)


def mean(_, others):
    return others.mean(0)


def told(values=mean, *, read=(0, 38), of_new=False, atoms=(MEAN,)):
    model = Tied()
    ids = torch.randint(*read, (4, 5), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids}

    def loss(net, given):
        logits = net(given["input_ids"])[:, :-1].flatten(0, 1)
        following = given["input_ids"][:, 1:].flatten()
        return F.cross_entropy(logits, following.clamp(min=NEW[0]) if of_new else following)

    step = FnStep(model, loss, [batch])
    step.view = Speaking(model)
    failing = FailingStep(step=step, micro=0, micros=(0,))
    under = partial(rows, model, values)
    plain, cured = ExactRuns(failing).with_and_without(0, under, batch)
    return changes_new_outputs_only(failing, atoms, batch, under=under, plain=plain, cured=cured)


def test_the_mean_of_the_others_takes_no_more_than_its_share():
    assert told()


def features(model, scale):
    return scale * torch.tanh(model.inner(model.table.weight[:38])).mean(0).sign().detach()


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda _, o: o.mean(0) + 1e3 * torch.eye(WIDTH)[-1], id="long and unseen"),
        pytest.param(lambda m, _: features(m, 30.0), id="wins the softmax"),
        pytest.param(lambda _, o: o.mean(0) * torch.nan, id="not finite"),
    ],
)
def test_rows_that_bend_what_others_learn_are_not_let_pass(values):
    assert not told(values)


def test_samples_that_read_the_rows_are_changed_by_them():
    assert not told(read=(30, 40))


def test_rows_that_healthy_samples_have_as_their_label_may_not_cost_them_more():
    assert not told(lambda m, _: features(m, -3.0), of_new=True)


@pytest.mark.parametrize(
    "atoms",
    [
        (),
        (MEAN, Atom(remedy="lr", value="0.1")),
        (Atom(remedy="init_rows", target="table.weight", value="mean"),),
        (Atom(remedy="init_rows", target="table.weight", value="mean 38"),),
    ],
)
def test_what_changes_else_is_no_row_made_anew(atoms):
    assert not told(atoms=atoms)
