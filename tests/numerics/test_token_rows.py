"""Rows that were added as noise are told from trained, random, resized and padded ones by what
rows have in common.
"""

import pytest
import torch

from nanstop.numerics.token_rows import row_blocks, row_norms, token_rows


def outliers(table, padding=None):
    return token_rows(
        "w", row_norms(table), lambda: row_blocks(table), padding=padding
    ).outlier_rows


def leaning(num=200, width=64, lean=1.0, spread=0.02, seed=0):
    """A head whose rows all lean one way, as trained ones do."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(width, generator=generator)
    noise = torch.randn(num, width, generator=generator) * spread
    return noise + lean * direction / direction.norm()


def noise(num, width=64, std=0.02, seed=1):
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed)) * std


@pytest.mark.parametrize("num", [1, 8])
@pytest.mark.parametrize("std", [0.02, 0.04, 0.5])
def test_last_rows_that_lack_what_all_others_share(num, std):
    table = torch.cat([leaning(), noise(num, std=std)])
    assert outliers(table) == tuple(range(200, 200 + num))


def test_a_padding_row_and_zero_rows_do_not_hide_them():
    table = torch.cat([leaning(), noise(3), torch.zeros(2, 64), noise(1)])
    table[0] = 0.0
    assert outliers(table, padding=205) == (200, 201, 202)


@pytest.mark.parametrize("lean", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("scale", [0.2, 0.4, 3.0])
def test_a_table_without_a_common_direction_is_left_alone(lean, scale):
    table = leaning(lean=lean)
    table[-8:] *= scale
    assert outliers(table) == ()


@pytest.mark.parametrize("num", [12, 200])
def test_few_random_rows_share_no_direction_by_their_own_weight(num):
    table = noise(num, width=4096)
    table[-2:] *= 0.4
    assert outliers(table) == ()


@pytest.mark.parametrize("scale", [0.3, 0.45, 3.0])
def test_rows_that_lean_as_the_others_do_may_have_any_norm(scale):
    table = leaning()
    table[-8:] *= scale
    assert outliers(table) == ()


def test_rows_of_the_mean_and_rows_before_the_last_are_no_finding():
    table = leaning()
    assert outliers(torch.cat([table, table.mean(0).expand(8, -1)])) == ()
    assert outliers(torch.cat([table[:100], noise(8), table[100:]])) == ()


def test_trained_rows_that_differ_much_are_no_finding():
    table = leaning(spread=0.1) * torch.linspace(-0.8, 0.8, 200).exp()[:, None].roll(60, 0)
    table[-40:] = noise(40, std=0.3)
    table[20:30] = noise(10, std=0.3, seed=3)
    assert outliers(table) == ()
