"""Finite and wrong: where digits, positions, gradients and pooled tokens go, and silence where
nothing is lost.
"""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.measure.float32_distance import gradient_rows, logit_gap, run_window
from nanstop.measure.pooled_token import pooled_rows
from nanstop.measure.position_rounding import coarse_rows
from nanstop.measure.precision_loss import drift_rows
from nanstop.measure.ranges import op_formats
from nanstop.remedies.precision import reference
from nanstop.replay.conditions import without_dropout

torch.set_num_threads(1)


def step_of(model, **batch):
    return FnStep(model, lambda m, b: m(**b).float().pow(2).mean(), [batch])


def wide(step):
    return lambda: reference(step.view)


class OneByOne(nn.Module):
    """E[x^2] - E[x]^2, which loses all digits of a small deviation around a large mean."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-2)


class Centred(nn.Module):
    def forward(self, x):
        rest = x - x.mean(-1, keepdim=True)
        return rest * torch.rsqrt(rest.float().pow(2).mean(-1, keepdim=True) + 1e-2).to(x.dtype)


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.head = nn.Linear(64, 64, bias=False), norm, nn.Linear(64, 8)
        nn.init.eye_(self.layer.weight)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.head(self.norm(self.layer(x)))


def test_cancellation_is_placed_at_the_subtraction():
    step = step_of(Normed(OneByOne()), x=(20 + 0.5 * torch.randn(4, 8, 64)).bfloat16())
    first = drift_rows(step, under=wide(step))[0]
    assert (first.module, first.op, first.dtype) == ("norm", "aten.sub.Tensor", "bfloat16")
    assert first.before < 0.02
    assert first.after > 1.0


def test_a_stable_form_has_no_drift():
    step = step_of(Normed(Centred()), x=torch.randn(4, 8, 64).bfloat16())
    assert drift_rows(step, under=wide(step)) == ()


class Rope(nn.Module):
    """``counted``: format of the positions; ``stored``: format of the frequencies."""

    def __init__(self, counted, stored):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.3, 0.1, 0.03]).to(stored))
        self.counted = counted

    def forward(self, x):
        positions = torch.arange(x.shape[0]).to(self.counted)
        angles = positions[:, None].float() * self.inv_freq.float()
        return x * self.scale * angles.cos()


def ops(rows):
    return {row.op.split(".")[1] for row in rows}


@pytest.mark.parametrize(
    ("num_positions", "counted", "stored", "found"),
    [
        (256, torch.bfloat16, torch.float32, set()),
        (300, torch.bfloat16, torch.float32, {"_to_copy", "cos"}),
        (2048, torch.float16, torch.float32, set()),
        (2100, torch.float16, torch.float32, {"_to_copy", "cos"}),
        (300, torch.int64, torch.bfloat16, {"cos"}),
        (300, torch.int64, torch.float32, set()),
    ],
)
def test_positions(num_positions, counted, stored, found):
    step = step_of(Rope(counted, stored), x=torch.ones(num_positions, 4))
    assert ops(coarse_rows(step)) == found


def test_positions_made_in_half_and_counts_that_fit():
    class Arange(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x, mask):
            made = torch.arange(x.shape[0], dtype=torch.bfloat16).float()
            return x * self.scale * made + mask.to(torch.bfloat16).float()

    mask = torch.ones(300, dtype=torch.int64)
    (row,) = coarse_rows(step_of(Arange(), x=torch.ones(300), mask=mask))
    assert (row.op, row.dtype) == ("aten.arange.default", "bfloat16")
    assert (row.absmax, row.error) == (299.0, 1.0)


class Pooled(nn.Module):
    """Reads one token of each row, ``offset`` behind the last that the mask has."""

    def __init__(self, offset, used=True, padding=None, wide=1):
        super().__init__()
        self.words = nn.Embedding(5, 4, padding_idx=padding)
        self.score, self.offset, self.used = nn.Linear(4, wide), offset, used

    def forward(self, ids, attention_mask):
        last = attention_mask.sum(-1) - 1 + self.offset
        states = self.score(self.words(ids))
        read = states[torch.arange(len(ids)), last]
        return read if self.used else states * torch.ones_like(read).unsqueeze(-1)


PADDED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]])


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize(("offset", "num_bad"), [(0, 0), (1, 3)])
def test_a_token_that_the_mask_leaves_out(offset, num_bad, padding):
    step = step_of(Pooled(offset, padding=padding), ids=PADDED, attention_mask=PADDED)
    assert pooled_rows(step).get("num_rows_pooled_at_padding", 0) == num_bad


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores: -nn.functional.logsigmoid(scores[0] - scores[1]).mean(),
        lambda scores: nn.functional.cross_entropy(scores, torch.tensor([0, 1, 0])),
        lambda scores: scores.var(),
    ],
    ids=["pairs", "classes", "spread"],
)
def test_a_token_that_the_mask_leaves_out_under_a_loss_of_differences(loss):
    batch = {"ids": PADDED, "attention_mask": PADDED}
    step = FnStep(Pooled(1, wide=2), lambda model, given: loss(model(**given)), [batch])
    assert pooled_rows(step)["num_rows_pooled_at_padding"] == 3


def test_what_the_mask_keeps_is_no_padding_and_what_nobody_uses_is_not_read():
    kept = torch.ones_like(PADDED)
    assert pooled_rows(step_of(Pooled(0, padding=0), ids=PADDED, attention_mask=kept)) == {}
    assert pooled_rows(step_of(Pooled(1, used=False), ids=PADDED, attention_mask=PADDED)) == {}


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.lm_head = nn.Dropout(0.5), nn.Linear(16, 32)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.lm_head(self.drop(x))


def headed_step():
    step = step_of(Headed(), x=torch.randn(4, 16).bfloat16())
    step.view.head = lambda: "lm_head"
    return step


def test_distance_of_logits_is_that_of_the_tensors():
    step = headed_step()
    with without_dropout(step.view.root):
        own, true = run_window(step), run_window(step, under=wide(step))
    gap = logit_gap(own, true)
    a, b = own.logits[0].float(), true.logits[0]
    logprobs = (a.log_softmax(-1) - b.log_softmax(-1)).abs() * b.softmax(-1)
    assert gap.logprob_mean == pytest.approx(float(logprobs.sum(-1).mean()), rel=1e-4)
    assert step.view.root.drop.p == 0.5
    assert logit_gap(own, own).logprob_max == 0.0


def test_no_head_no_distance():
    own = run_window(step_of(Headed(), x=torch.randn(4, 16).bfloat16()))
    assert logit_gap(own, own) is None


def test_gradients_that_float32_has_and_the_run_has_not():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float16))

        def forward(self, x):
            return self.weight * x

    factors = torch.tensor([1.0, 1e-3, 1e-9, 0.0])
    for scale, flushed in ((1.0, 1), (2.0**15, 0)):
        step = FnStep(
            Tiny(),
            lambda m, b, s=scale: (m(b["x"]).float() * factors).sum() * s,
            [{"x": torch.ones(4, dtype=torch.float16)}],
        )
        own, true = run_window(step), run_window(step, under=wide(step))
        (row,) = gradient_rows(own, true, op_formats(step), scale)
        assert (row.num_nonzero, row.num_flushed) == (3, flushed)
        assert row.absmax == 1.0
        assert row.dtype == "float16"
