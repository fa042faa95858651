"""Causes, however the script spells them: what is said follows from descent and experiment, never
from a name or an operation alone.
"""

from contextlib import suppress

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanstop

ROWS, WIDTH = 4, 8


def said(loss, **batch):
    """Return the diagnoses of the incident of one step with ``loss(net, batch)``."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with (
        nanstop.watch(net, optimizer, policy="observe") as watch,
        suppress(IndexError, RuntimeError),
    ):
        watch.step(lambda given: loss(net, given), batch)
        watch.update()
    return watch.incidents[0].diagnoses


def x(zero_row=None):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(ROWS, WIDTH, generator=generator)
    if zero_row is not None:
        values[zero_row] = 0.0
    return values


NO_MASK = torch.zeros(ROWS, WIDTH)
EMPTY_COUNTS = {
    "divided": lambda net, b: (net(b["v"]) * b["kl"]).sum() / b["kl"].sum(),
    "by the mean": lambda net, b: (net(b["v"]) * b["kl"]).mean() / b["kl"].mean(),
    "times a reciprocal": lambda net, b: (net(b["v"]) * b["kl"]).sum() * b["kl"].sum().reciprocal(),
    "times a power": lambda net, b: (net(b["v"]) * b["kl"]).sum() * b["kl"].sum().pow(-1),
    "by rows": lambda net, b: ((net(b["v"]) * b["kl"]).sum(-1) / b["kl"].sum(-1)).mean(),
    "of what a filter leaves": lambda net, b: net(b["v"])[b["kl"].bool()].mean(),
    "of comparisons": lambda net, b: net(b["v"]).sum() / (b["v"] > 1e9).sum(),
    "by einsum": lambda net, b: (
        net(b["v"]).sum() / torch.einsum("ij,ij->", (b["v"] > 1e9).float(), (b["v"] < 1e9).float())
    ),
}


@pytest.mark.parametrize("spelled", EMPTY_COUNTS)
def test_a_count_of_0(spelled):
    found = said(EMPTY_COUNTS[spelled], v=x(), kl=NO_MASK)
    assert (found[0].code, found[0].confidence) == ("NS205", "certain")
    assert found[0].confirmed


ZERO_NORMS = {
    "divided": lambda v: v / v.norm(dim=-1, keepdim=True),
    "times a reciprocal": lambda v: v * v.norm(dim=-1, keepdim=True).reciprocal(),
    "inverse root": lambda v: v * torch.rsqrt(v.square().sum(-1, keepdim=True)),
    "power": lambda v: v * v.pow(2).mean(-1, keepdim=True).pow(-0.5),
    "largest": lambda v: v / v.abs().amax(-1, keepdim=True),
    "deviation": lambda v: (v - v.mean(-1, keepdim=True)) / v.std(-1, keepdim=True),
    "range": lambda v: (v - v.amin()) / (v - v).abs().amax(),
    "cosine by hand": lambda v: (
        v.T @ ((v @ v.T) / (v.norm(dim=-1)[:, None] * v.norm(dim=-1)[None]))
    ),
}


@pytest.mark.parametrize("spelled", ZERO_NORMS)
def test_a_norm_of_0(spelled):
    def loss(net, batch):
        return net(ZERO_NORMS[spelled](batch["count"])[:, :1].expand(-1, WIDTH)).sum()

    found = said(loss, count=x(zero_row=2))
    assert (found[0].code, found[0].confidence) == ("NS206", "certain")


def test_the_eps_that_float16_rounds_away():
    def loss(net, batch):
        variance = batch["v"].half().pow(2).mean(-1, keepdim=True)
        return net((batch["v"].half() * torch.rsqrt(variance + 1e-12)).float()).sum()

    found = said(loss, v=x(zero_row=1))
    assert found[0].code == "NS206"
    assert any("its eps 1e-12 is 0 in float16" in line for line in found[0].lines)


SUMS = {
    "weights of neighbours": lambda net, b: net(b["v"]) / b["w"].sum(-1, keepdim=True),
    "overlap": lambda net, b: net(b["v"]).sum() / (F.relu(net(b["v"]) - 99) + 0 * b["w"]).sum(),
}


@pytest.mark.parametrize("spelled", SUMS)
def test_a_sum_of_0(spelled):
    weights = torch.tensor([[0.3, 0.0], [0.0, 0.0], [0.5, 1.0], [0.2, 0.2]]).repeat(1, 4)
    found = said(lambda net, b: SUMS[spelled](net, b).sum(), v=x(), w=weights)
    assert (found[0].code, found[0].confidence) == ("NS205", "certain")
    assert "sum" in found[0].cause
    assert "count" not in found[0].cause


def test_the_range_of_what_does_not_vary():
    def loss(net, batch):
        low, high = batch["blank"].min(), batch["blank"].max()
        return net((batch["blank"] - low) / (high - low)).sum()

    assert said(loss, blank=torch.ones(ROWS, WIDTH))[0].code == "NS206"


NUMBERS = {
    "divided by 0": (lambda net, b: net(b["v"]) / 0.0, "the number 0 of the program"),
    "filled in": (
        lambda net, b: net(b["v"]).masked_fill(b["v"] > 0, -torch.inf),
        "the constant -inf",
    ),
    "written down": (
        lambda net, b: net(b["v"]) + torch.tensor([0.0] * 7 + [-torch.inf]),
        "-inf that the program writes",
    ),
    "from NumPy": (
        lambda net, b: net(b["v"]) * torch.from_numpy(numpy.array([1.0, numpy.nan] * 4)),
        "nan that the program writes",
    ),
}


@pytest.mark.parametrize("spelled", NUMBERS)
def test_a_number_of_the_program_is_named(spelled):
    loss, named = NUMBERS[spelled]
    found = said(lambda net, b: loss(net, b).sum(), v=x())
    assert found[0].code == "NS204"
    assert named in found[0].cause


def test_a_number_of_the_program_is_neither_count_nor_norm():
    found = said(lambda net, b: net(b["v"]).sum() / torch.tensor(0.0), v=x())
    assert found[0].code == "NS204"


OFF = torch.full((ROWS, WIDTH), -torch.inf)
ATTENTION = {
    "product": lambda net, b: net((b["v"] @ b["v"].T + b["off"][:, :ROWS]).softmax(-1) @ b["v"]),
    "einsum": lambda net, b: net(
        torch.einsum("qk,kd->qd", F.softmax(b["v"] @ b["v"].T + b["off"][:, :ROWS], -1), b["v"])
    ),
    "dropped out": lambda net, b: net(
        F.dropout((b["v"] @ b["v"].T + b["off"][:, :ROWS]).softmax(-1), 0.1) @ b["v"]
    ),
    "in float32": lambda net, b: net(
        (b["v"] @ b["v"].T + b["off"][:, :ROWS]).softmax(-1, dtype=torch.float32) @ b["v"]
    ),
}


@pytest.mark.parametrize("spelled", ATTENTION)
def test_a_row_of_attention_that_hides_every_key(spelled):
    found = said(lambda net, b: ATTENTION[spelled](net, b).sum(), v=x(), off=OFF)
    assert (found[0].code, found[0].confidence) == ("NS202", "certain")


CHOICES = {
    "router": lambda net, b: (net(b["attention"]) + OFF).softmax(-1).topk(2).values.sum(),
    "policy": lambda net, b: (
        (net(b["attention"]) + OFF).softmax(-1).gather(1, torch.zeros(ROWS, 1, dtype=torch.long))
    ).sum(),
}


@pytest.mark.parametrize("spelled", CHOICES)
def test_a_choice_that_hides_everything_is_no_attention(spelled):
    found = said(CHOICES[spelled], attention=x())
    assert "NS202" not in [one.code for one in found]


def cold(net, batch):
    return (1e4 * net(batch["v"])).softmax(-1)


def test_the_logarithm_of_a_rounded_probability():
    found = said(lambda net, b: -cold(net, b).log().mean(), v=x())
    assert (found[0].code, found[0].confidence) == ("NS207", "certain")
    assert "probability" in found[0].cause


def test_the_logarithm_of_a_choice_that_is_hidden():
    def loss(net, b):
        chances = net(b["v"]).masked_fill(b["v"] > 0, -torch.inf).softmax(-1)
        return (chances * chances.log()).sum()

    found = said(loss, v=x())
    assert (found[0].code, found[0].cause) == ("NS207", "the logarithm of a probability of 0")


ROUNDED = {
    "mixture": lambda net, b: ((-(net(b["v"]).square()) - 400.0).exp() / 3.0).sum(-1).log().mean(),
    "product": lambda net, b: (net(b["v"]).sigmoid() * 1e-3).pow(20).log().mean(),
    "weighted": lambda net, b: (
        (net(b["v"]).softmax(-1) * (-1e3 * (b["v"] - 99.0).abs()).exp()).sum(-1).log().mean()
    ),
}


@pytest.mark.parametrize("spelled", ROUNDED)
def test_the_logarithm_of_a_number_that_was_rounded_to_0(spelled):
    found = said(ROUNDED[spelled], v=x())
    assert found[0].code == "NS207"
    assert found[0].cause.endswith("that was rounded to exactly 0")
    assert any("rounds to 0 what is not 0" in line for line in found[0].lines)


def test_the_logarithm_of_another_zero_has_no_story():
    found = said(lambda net, b: net(b["v"]).sum() + b["prob"].log().sum(), v=x(), prob=x(1).abs())
    assert found[0].code == "NS207"
    assert found[0].cause == "the logarithm of an exact 0"


def test_the_logarithm_within_a_distribution():
    def loss(net, b):
        policy = torch.distributions.Beta(net(b["v"]).exp() + 1, torch.ones(ROWS, WIDTH) + 1)
        return policy.log_prob(torch.ones(ROWS, WIDTH)).sum()

    found = said(loss, v=x())
    assert (found[0].code, found[0].confidence) == ("NS207", "certain")
    assert found[0].cause == "the logarithm of an exact 0"


@pytest.mark.parametrize(
    ("spelled", "named"),
    [(torch.abs, "magnitudes"), (torch.square, "squares")],
)
def test_what_is_divided_by_a_target_is_divided_by_no_norm(spelled, named):
    target = torch.ones(ROWS, WIDTH)
    target[0, 0] = 0
    found = said(lambda net, b: ((net(b["v"]) - b["t"]) / spelled(b["t"])).sum(), v=x(), t=target)
    assert (found[0].code, found[0].title) == ("NS206", "division by a magnitude of 0")
    assert f"1 of the {ROWS * WIDTH} {named} that `div` divides by are 0" in found[0].cause


OUTSIDE = {
    "square root": (lambda out: out.sqrt(), "the `sqrt` of negative numbers, down to -"),
    "logarithm": (lambda out: out.log2(), "the `log2` of negative numbers, down to -"),
    "logarithm of more": (lambda out: (9 * out).log1p(), "the `log1p` of numbers below -1"),
    "power": (lambda out: out**1.5, "to a power that is not whole"),
    "learned power": (
        lambda out: out.pow(out.detach().square().mean() + 0.3),
        "to a power that is not whole",
    ),
    "arc": (lambda out: (9 * out).acos(), "the `acos` of numbers beyond 1 in magnitude, by up to "),
}


@pytest.mark.parametrize("spelled", OUTSIDE)
def test_numbers_that_a_function_has_no_value_for(spelled):
    function, named = OUTSIDE[spelled]
    found = said(lambda net, b: function(net(b["v"])).sum(), v=x())
    assert (found[0].code, found[0].confidence) == ("NS204", "certain")
    assert named in found[0].cause


RATIOS = {
    "of two runs": lambda net, b: (
        (50 * net(b["v"])).log_softmax(-1) - (-500 * net(b["v"])).log_softmax(-1)
    ).exp(),
    "to noted ones": lambda net, b: (net(b["v"]).log_softmax(-1)[:, 0] - b["a"]).exp(),
}


@pytest.mark.parametrize("spelled", RATIOS)
def test_a_ratio_of_policies(spelled):
    found = said(lambda net, b: RATIOS[spelled](net, b).sum(), v=x(), a=torch.full((ROWS,), -200.0))
    assert (found[0].code, found[0].confidence) == ("NS702", "certain")


def test_a_variational_code_is_no_policy():
    def loss(net, batch):
        kl_log_ratio = 100 * net(batch["v"])
        return (kl_log_ratio.exp() + 1 - kl_log_ratio).sum()

    found = said(loss, v=5 * x())
    assert found[0].code == "NS207"
    assert "NS702" not in [one.code for one in found]


CHOSEN = torch.arange(ROWS)
BAD = torch.tensor([1.0, torch.inf, 0.0, 2.0])
REWARDED = {
    "gathered": lambda net, b: (
        net(b["v"]).log_softmax(-1).gather(1, b["i"][:, None])[:, 0] * b["a"]
    ).mean(),
    "indexed": lambda net, b: (net(b["v"]).log_softmax(-1)[range(ROWS), b["i"]] * b["a"]).sum(),
    "by cross entropy": lambda net, b: b["a"].dot(
        F.cross_entropy(net(b["v"]), b["i"], reduction="none")
    ),
    "whitened": lambda net, b: (
        (b["a"] - b["a"].mean()) * F.cross_entropy(net(b["v"]), b["i"], reduction="none")
    ).sum(),
    "a clipped ratio": lambda net, b: (
        (F.cross_entropy(net(b["v"]), b["i"], reduction="none").neg() - b["old"]).exp().clamp(0, 2)
        * b["a"]
    ).sum(),
}


@pytest.mark.parametrize("spelled", REWARDED)
def test_a_reward_is_what_weighs_choices_whatever_it_is_called(spelled):
    found = said(REWARDED[spelled], v=x(), i=CHOSEN, a=BAD, old=torch.full((ROWS,), -2.0))
    assert (found[0].code, found[0].confidence) == ("NS704", "likely")
    assert "`batch[a]`" in found[0].title


NO_REWARDS = {
    "a feature": lambda net, b: F.cross_entropy(net(b["v"] * b["rewards"][:, None]), b["i"]),
    "a teacher": lambda net, b: F.kl_div(
        net(b["v"]).log_softmax(-1), b["rewards"][:, None].expand(-1, WIDTH)
    ),
    "weights of classes": lambda net, b: F.cross_entropy(
        net(b["v"])[:, :ROWS], b["i"], weight=b["rewards"]
    ),
    "a target": lambda net, b: (net(b["v"])[:, 0] - b["rewards"]).square().mean(),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("spelled", NO_REWARDS)
def test_what_is_called_reward_and_weighs_no_choice_is_none(spelled):
    found = said(NO_REWARDS[spelled], v=x(), i=CHOSEN, rewards=BAD)
    assert "NS704" not in [one.code for one in found]


def test_labels_that_are_all_ignored_in_any_spelling():
    labels = torch.full((ROWS,), -100)
    found = said(lambda net, b: F.cross_entropy(net(b["v"]), b["labels"]), v=x(), labels=labels)
    assert (found[0].code, found[0].confidence) == ("NS503", "certain")

    def by_hand(net, batch):
        kept = batch["labels"] != -100
        scores = net(batch["v"]).log_softmax(-1).gather(1, batch["labels"].clamp(min=0)[:, None])
        return -(scores[:, 0] * kept).sum() / kept.sum()

    found = said(by_hand, v=x(), labels=labels)
    assert found[0].code in ("NS503", "NS205")
    assert found[0].confidence == "certain"


@pytest.mark.parametrize("ignored", [0, 1, 255])
def test_labels_that_a_loss_leaves_out_by_a_number_of_its_own(ignored):
    labels = torch.full((ROWS,), ignored)

    def flat(net, batch):
        return F.cross_entropy(net(batch["v"]), batch["labels"], ignore_index=ignored)

    def map_of_pixels(net, batch):
        scores, kept = net(batch["v"]).T[None, :, None], batch["labels"][None, None]
        return F.cross_entropy(scores, kept, ignore_index=ignored)

    def weighted(net, batch):
        ones, scores = torch.ones(WIDTH), net(batch["v"])
        return F.cross_entropy(scores, batch["labels"], weight=ones, ignore_index=ignored)

    for spelled in (flat, map_of_pixels, weighted):
        found = said(spelled, v=x(), labels=labels)
        assert (found[0].code, found[0].confidence) == ("NS503", "certain")
        assert "leaves out every entry of `batch[labels]`" in found[0].cause
        assert f"], {ignored}: its mean" in found[0].cause


def test_classes_that_weigh_nothing_are_not_left_out():
    def loss(net, batch):
        none = torch.zeros(WIDTH)
        return F.cross_entropy(net(batch["v"]), batch["labels"], weight=none, ignore_index=1)

    assert said(loss, v=x(), labels=torch.zeros(ROWS, dtype=torch.long))[0].code == "NS205"


def test_a_mask_that_keeps_no_token_whatever_it_is_called():
    keep, ids = torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS)

    def by_hand(net, batch):
        losses = F.cross_entropy(net(batch["v"]), batch["w"], reduction="none")
        return (losses * batch["q"]).sum() / batch["q"].sum()

    found = said(by_hand, v=x(), w=ids, q=keep, type_ids=keep)
    assert (found[0].code, found[0].confidence, found[0].where) == ("NS503", "certain", "q")

    def picked(net, batch):
        chosen = batch["q"].bool()
        return F.cross_entropy(net(batch["v"])[chosen], batch["w"][chosen])

    found = said(picked, v=x(), w=ids, q=keep)
    assert (found[0].code, found[0].confidence) == ("NS503", "certain")

    def pooled(net, batch):
        return (net(batch["v"]) * batch["q"][:, None]).sum() / batch["q"].sum()

    assert said(pooled, v=x(), q=keep)[0].code == "NS205"


def test_labels_without_a_part_in_the_failure_are_not_blamed():
    def loss(net, batch):
        counted = (batch["labels"] != -100).sum()
        return net(batch["v"] / (batch["v"] - batch["v"]).norm()).sum() + counted

    found = said(loss, v=x(), labels=torch.full((ROWS,), -100))
    assert "NS503" not in [one.code for one in found if one.confidence == "certain"]
    assert found[0].code == "NS206"


LOWEST = torch.finfo(torch.float32).min
SCALED_MASKS = {
    "divided": lambda scores, hide: (scores + hide) / 0.5,
    "times": lambda scores, hide: (scores + hide) * 3.0,
    "chosen": lambda scores, hide: torch.where(hide < 0, LOWEST, scores) / 0.7,
}


@pytest.mark.parametrize("spelled", SCALED_MASKS)
def test_a_mask_that_a_temperature_takes_beyond_its_format(spelled):
    def loss(net, b):
        scores = net(b["v"]) @ net(b["v"]).mT
        return (SCALED_MASKS[spelled](scores, b["hide"]).softmax(-1) @ net(b["v"])).square().mean()

    hide = torch.zeros(ROWS, ROWS)
    hide[2] = LOWEST
    found = said(loss, v=x(), hide=hide)
    assert found[0].code == "NS203"
    assert found[0].confidence != "possible"


def test_a_mask_in_half_precision_that_is_filled_with_too_low_a_number():
    def loss(net, batch):
        return net(batch["v"]).half().masked_fill(batch["v"] > 0, -1e9).softmax(-1).sum()

    found = said(loss, v=x())
    assert (found[0].code, found[0].confidence) == ("NS203", "certain")


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
