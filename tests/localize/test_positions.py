"""Samples and tokens are said only where the axes are surely those of the batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planted
from nanstop.localize.positions import Grid, positions_of
from nanstop.records import Position
from planted import Net, located

ROWS, TOKENS = 2, 5


def grid(*shapes, tokens=TOKENS, rows=ROWS):
    root = nn.Module()
    for place, shape in enumerate(shapes):
        root.register_parameter(f"p{place}", nn.Parameter(torch.zeros(shape)))
    return Grid((rows, tokens), root)


def at(shape, *places):
    mask = torch.zeros(shape, dtype=torch.bool)
    for place in places:
        mask[place] = True
    return mask


def test_batch_and_tokens_first():
    mask = at((2, 5, 8), (0, 1, 3), (0, 3, 0), (1, 4, 7))
    assert positions_of(mask, grid((8, 8))) == (
        Position(sample=0, first_token=1, last_token=3),
        Position(sample=1, first_token=4, last_token=4),
    )


def test_heads_between():
    mask = at((2, 3, 5, 8), (1, 2, 4, 0))
    assert positions_of(mask, grid((8, 8))) == (Position(sample=1, first_token=4, last_token=4),)


def test_query_axis_of_scores():
    mask = at((2, 3, 5, 5), (1, 0, 2, 4))
    assert positions_of(mask, grid((8, 8))) == (Position(sample=1, first_token=2, last_token=2),)


def test_tokens_alone():
    assert positions_of(at((2, 5), (1, 3)), grid((8, 8)))[0].first_token == 3


@pytest.mark.parametrize(
    ("shape", "weights", "why"),
    [
        ((5, 2, 8), [(8, 8)], "sequence first"),
        ((8, 8), [(8, 8)], "a weight"),
        ((5, 2), [(2, 5)], "a weight, transposed"),
        ((2, 5), [(2, 5)], "a weight of the batch's own shape"),
        ((2, 5), [(5, 5)], "pooled rows of hidden size 5"),
        ((2, 5, 5), [(5, 5)], "tokens or hidden"),
        ((2, 5, 5, 8), [(8, 8)], "five heads or five tokens"),
        ((10, 8), [(8, 8)], "flattened"),
        ((2,), [(8, 8)], "one number a row"),
        ((2, 4, 8), [(8, 8)], "another length"),
        ((2, 8, 5), [(8, 8)], "channels first"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsure_axes_are_unknown(shape, weights, why):
    assert positions_of(torch.ones(shape, dtype=torch.bool), grid(*weights)) is None, why


def test_square_batch_is_unknown():
    assert positions_of(at((5, 5, 8), (0, 1, 0)), grid((8, 8), rows=5)) is None


def test_tokens_equal_to_hidden_size_with_features_last():
    mask = at((2, 8, 32), (1, 6, 0))
    found = positions_of(mask, grid((8, 32), tokens=8))
    assert found == (Position(sample=1, first_token=6, last_token=6),)


def test_weight_gradient_is_not_taken_for_the_batch():
    """16 tokens and 16 hidden units: the gradient of a [2, 16] weight has the batch's shape."""
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 2))

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / (grad - grad)

    def loss(m, b):
        weight = Bad.apply(m[1].weight)
        return F.linear(m[0](b["input_ids"]), weight).sum()

    found = located(model, loss, {"input_ids": planted.ids()})
    assert (found.key.phase, found.positions) == ("backward", None)
    assert found.first_bad.outputs[0].shape == (2, 16)


def test_flattened_heads_are_read_back_from_the_memory_layout():
    """Scores are computed as [rows * heads, tokens, tokens] and read as [rows, heads, tokens,
    tokens].
    """

    def body(x):
        heads = x.view(2, 16, 2, 4).transpose(1, 2)
        heads = heads * torch.where(torch.arange(16) == 6, 1e20, 1.0)[None, None, :, None]
        scores = torch.matmul(heads[:, :, :, :], heads.transpose(2, 3))
        weights = F.softmax(scores * 0.5, -1)
        return torch.matmul(weights, heads).transpose(1, 2).flatten(2)

    found = located(Net(body))
    assert found.key.op == "aten.bmm.default"
    assert {(p.sample, p.first_token, p.last_token) for p in found.positions} == {
        (0, 6, 6),
        (1, 6, 6),
    }


def test_rows_of_a_product_are_those_of_what_it_read():
    """The projection of a state space model is turned and cut before anything reads it as [rows,
    tokens, ...].
    """

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = nn.Linear(8, 12, bias=False)

        def forward(self, x):
            large = x * 0 + torch.where(torch.arange(16) == 6, 1e38, 1.0)[:, None]
            halves = self.projection(large).transpose(1, 2).chunk(2, 1)
            return (halves[0] * halves[1]).transpose(1, 2)[..., :1] + x

    model = Net(Mixer())
    with torch.no_grad():
        model.body.projection.weight.fill_(1.0)
    found = located(model)
    assert (found.key.op, found.key.module) == ("aten.mm.default", "body.projection")
    assert found.positions == tuple(
        Position(sample=row, first_token=6, last_token=6) for row in (0, 1)
    )


def test_flattened_linear_is_read_back():
    model = Net(lambda x: x * 2)
    with torch.no_grad():
        model.embed.weight[planted.ids()[1, 7]] = 1e30
        model.proj.weight.fill_(1e30)
    batch = planted.text_batch()
    spoiled = {"input_ids": batch["input_ids"].clone(), "labels": batch["labels"]}
    found = located(model, batch=spoiled)
    assert found.key.op == "aten.addmm.default"
    assert found.first_bad.outputs[0].shape == (32, 8)
    token = int(planted.ids()[1, 7])
    rows = [row for row in (0, 1) if (planted.ids()[row] == token).any()]
    assert [p.sample for p in found.positions] == rows
