"""Matrices, tables and texts that an operation refuses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from e2e.one_step import ROWS, WIDTH, said, x


def test_a_matrix_that_has_no_inverse():
    def loss(net, batch):
        return torch.linalg.inv(net(batch["v"]).T @ torch.zeros(ROWS, WIDTH)).sum()

    found = said(loss, v=x())
    assert found[0].code == "NS204"
    assert "singular" in found[0].cause


def test_the_table_is_what_the_operation_looked_in():
    table = nn.Embedding(4, WIDTH)
    found = said(lambda net, b: net(table(b["where"])).sum(), where=torch.tensor([1, 7]))
    assert (found[0].code, found[0].confidence) == ("NS502", "certain")


def test_an_index_that_was_an_infinity_is_told_from_one_that_was_counted():
    table = nn.Embedding(4, WIDTH)
    far = {"cast": torch.iinfo(torch.int64).min, "counted": -3}
    cures = {}
    for name, number in far.items():
        loss = lambda net, b, number=number: net(table(b["where"] * 0 + number)).sum()  # noqa: E731
        found = said(loss, where=torch.tensor([1, 3]))
        assert (found[0].code, found[0].confidence) == ("NS502", "certain")
        cures[name] = found[0].usual_cure
    assert cures["cast"].startswith("No id is that far from 0: Inf and NaN come to such numbers")
    assert cures["counted"].startswith("A number below 0 marks what has no place there")


def test_a_text_that_its_frames_cannot_spell_is_said_to_be_that():
    """Two equal labels have a blank between them: two frames are too few."""
    texts, lengths = torch.tensor([[3, 3], [3, 4]]), torch.tensor([2, 2])

    def loss(net, batch):
        frames = net(batch["v"]).view(2, ROWS // 2, WIDTH).transpose(0, 1).log_softmax(-1)
        return F.ctc_loss(frames, texts, lengths, lengths)

    found = said(loss, v=x())
    assert found[0].code == "NS204"
    assert "a text has more labels than its frames can spell" in found[0].cause
    assert any("zero_infinity=True" in line for line in found[0].lines)


DECOMPOSITIONS = {
    "linalg_cholesky_ex": lambda m: torch.linalg.cholesky(m).diagonal().log().sum(),
    "linalg_inv_ex": lambda m: torch.linalg.inv(m).sum(),
    "_linalg_solve_ex": lambda m: torch.linalg.solve(m, m).sum(),
}


@pytest.mark.parametrize("op", DECOMPOSITIONS)
def test_a_decomposition_that_is_refused_is_named_not_the_check_of_it(op):
    def loss(net, b):
        rows = net(b["v"])
        return DECOMPOSITIONS[op](rows @ rows.t())

    found = said(loss, v=torch.zeros(3, WIDTH))  # three equal rows: a matrix of rank 1
    assert found[0].code == "NS204"
    assert found[0].title == f"`{op}` refuses its inputs"
