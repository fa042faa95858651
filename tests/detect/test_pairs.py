"""Outputs that are compared with the targets of all rows are told however the objective is written;
those compared with their own, or with all on purpose, are not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from loop_scripts import findings_of
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
ROWS = 12
pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")


def by_hand(m, b):
    return (m(b["x"]) - b["y"]).pow(2).mean()


def targets_first(m, b):
    return (b["y"] - m(b["x"])).abs().sum()


def by_torch(m, b):
    return F.mse_loss(m(b["x"]), b["y"])


def smooth(m, b):
    return F.smooth_l1_loss(m(b["x"]), b["y"])


def squeezed_outputs(m, b):
    return (m(b["x"]).squeeze(-1) - b["y"][:, None]).pow(2).mean()


def whole_numbers(m, b):
    return (m(b["x"]) - (3 * b["y"]).long()).pow(2).mean()


def weights_of_rows(m, b):
    return ((m(b["x"]) - b["y"][:, None]).pow(2) * b["y"].abs()).mean()


def beside_another(m, b):
    return 0.01 * by_hand(m, b) + (m(b["x"]).squeeze(-1) * b["y"]).mean()


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (by_hand, "sub"),
        (targets_first, "sub"),
        (by_torch, "mse_loss"),
        (smooth, "smooth_l1_loss"),
        (squeezed_outputs, "sub"),
        (whole_numbers, "sub"),
        (weights_of_rows, "mul"),
        (beside_another, "sub"),
    ],
)
def test_each_output_against_all_targets_is_told(loss, op):
    (row,) = rows_of(loss)
    assert (row.given, row.width, row.op.split(".")[1]) == ("every_pair", ROWS, op)
    assert row.line.startswith("test_pairs.py:")


def own_row(m, b):
    return (m(b["x"]).squeeze(-1) - b["y"]).pow(2).mean()


def two_columns(m, b):
    return F.mse_loss(m(b["x"]), b["y"][:, None])


def every_pair_on_purpose(m, b):
    return (m(b["x"]) - b["y"][None]).pow(2).mean()


def all_alike(m, b):
    return (m(b["x"]) - torch.zeros(ROWS)).pow(2).mean()


def frequencies(m, b):
    return (m(b["x"]) * torch.arange(1.0, ROWS + 1)).sin().pow(2)[:, 3].mean()


def ranks(m, b):
    """Each row's place among all targets is a target of its own."""
    return ((m(b["x"]) * b["y"].sort().values).cumsum(1)[:, ::2]).sigmoid().mean()


def diagonal(m, b):
    return (m(b["x"]) - b["y"]).diagonal().pow(2).mean()


def not_in_the_loss(m, b):
    distance = (m(b["x"]) - b["y"]).abs().mean()
    return own_row(m, b) + 0.0 * distance.detach()


@pytest.mark.parametrize(
    "loss",
    [
        own_row,
        two_columns,
        every_pair_on_purpose,
        all_alike,
        frequencies,
        ranks,
        diagonal,
        not_in_the_loss,
    ],
)
def test_other_objectives_are_left_in_peace(loss):
    assert rows_of(loss) == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_whatever_the_format_is(dtype):
    (row,) = rows_of(by_hand, dtype)
    assert row.given == "every_pair"
    assert rows_of(diagonal, dtype) == ()


def rows_of(loss, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    batch = {"x": torch.randn(ROWS, 5, dtype=dtype), "y": torch.randn(ROWS, dtype=dtype)}
    return at_once(FnStep(model, loss, [batch]))["objective"]


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out, y: ((out - y) ** 2).mean(),
        lambda out, y: (1 - (out - y).cos()).mean(),
        lambda out, y: (1 / (1 + (out - y).abs())).mean().neg(),
    ],
    ids=["power", "less", "inverse"],
)
def test_operators_that_torch_wraps_keep_a_loop_from_no_look(loss_of, tmp_path):
    def train():
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(3):
            x = torch.randn(ROWS, 3)
            loss = loss_of(net(x), x.sum(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found = findings_of(tmp_path, train)
    assert found["NS118"].title == "each output is compared with the targets of all rows"
