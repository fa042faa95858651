"""What looks like a failure and is none, and decoys that stand beside a real one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import planted
from planted import INF, NAN, Net, located, located_body, op_of

LOWEST = torch.finfo(torch.float16).min
CAUSAL = torch.ones(16, 16, dtype=torch.bool).triu(1)


def attention(mask, shift=0.0):
    def body(x):
        scores = x @ x.transpose(-1, -2) - shift * torch.ones(16, 16, dtype=x.dtype)
        return F.softmax(scores + mask.to(x.dtype), -1) @ x

    return body


def fused_attention(mask):
    def body(x):
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(x.dtype))[:, 0]

    return body


def placeholder(x):
    buffer = x.new_full((4, 16, 8), NAN)
    buffer[:2] = x
    return buffer[:2]


def unread_branch(x):
    return torch.where(torch.ones_like(x) > 0, x, torch.full_like(x, NAN))


def position_buckets(x):
    distance = (torch.arange(16)[:, None] - torch.arange(16)[None]).abs()
    far = 4 + (torch.log(distance.float() / 4) / 1.5 * 4).to(torch.long)
    buckets = torch.where(distance < 4, distance, far.clamp(max=7))
    return x + buckets.float().mean() * 1e-3


def detached_metric(x):
    (x.detach() * NAN).mean()
    return x


def two_masks(x):
    lowest = torch.finfo(x.dtype).min
    causal = torch.full((16, 16), lowest, dtype=x.dtype).triu(1)
    padding = torch.zeros(16, 16, dtype=x.dtype)
    padding[:, 0] = lowest
    return attention(causal + padding)(x)


def large_constant_mask(x):
    """The mask of older models: (1 - mask) * -1e9 is -inf in float16."""
    inverted = CAUSAL.to(x.dtype)
    return attention(inverted * -1e9)(x)


def mask_of_logarithm(x):
    return attention(torch.log((~CAUSAL).float()))(x)


def uninitialised_and_filled(x):
    room = torch.empty_like(x)
    room.copy_(x)
    return room


def padded_rows_left_out(x):
    scores = (x @ x.transpose(-1, -2)).masked_fill(torch.arange(16)[:, None] == 0, -INF)
    mixed = F.softmax(scores.detach(), -1) @ x.detach()
    return torch.where((torch.arange(16) == 0)[None, :, None], x, mixed)


HEALTHY = [
    (attention(torch.full((16, 16), -INF).triu(1)), torch.float32),
    (attention(torch.full((16, 16), LOWEST).triu(1), shift=30.0), torch.float16),
    (fused_attention(torch.full((16, 16), -INF).triu(1)), torch.float32),
    (fused_attention(torch.full((16, 16), -INF).triu(1)), torch.float16),
    (placeholder, torch.float32),
    (unread_branch, torch.float32),
    (position_buckets, torch.float32),
    (detached_metric, torch.float32),
    (two_masks, torch.float16),
    (two_masks, torch.float32),
    (large_constant_mask, torch.float16),
    (mask_of_logarithm, torch.float32),
    (uninitialised_and_filled, torch.float32),
    (padded_rows_left_out, torch.float32),
    (lambda x: torch.cat([x, x[:0]]), torch.float32),
    (lambda x: x + (torch.arange(16) // 2)[None, :, None], torch.float32),
    (lambda x: x.to(torch.float8_e4m3fn).to(x.dtype) + x, torch.float32),
    (lambda x: x + torch.zeros_like(x).norm(dim=-1, keepdim=True), torch.float32),
    (nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (2, 16))), torch.float32),
]


@pytest.mark.parametrize(("body", "dtype"), HEALTHY)
def test_healthy_code_is_silent(body, dtype):
    assert located_body(body, dtype) is None


def test_bad_parameter_that_nothing_reads():
    model = Net(lambda x: x)
    model.unused = nn.Parameter(torch.full((3,), NAN))
    assert located(model) is None


def test_bad_rows_of_a_table_that_are_not_looked_up():
    model = Net(lambda x: x)
    with torch.no_grad():
        model.embed.weight[:3] = NAN
    assert located(model) is None


def test_loss_masked_out_by_selection():
    def loss(model, batch):
        losses = model.head(model.proj(model.embed(batch["input_ids"]))).mean(-1)
        broken = torch.cat([losses[:, :1].detach() * NAN, losses[:, 1:]], 1)
        return broken[:, 1:].mean()

    assert located(Net(lambda x: x), loss) is None


def absorbing(function):
    spread = torch.tensor([1e-6] * 4 + [1.0] * 4, dtype=torch.float16)

    def body(x):
        huge = (x.abs() + 2) * spread * 60000
        return x + function(huge) * 1e-3

    return body


@pytest.mark.parametrize(
    "function",
    [
        torch.nan_to_num,
        lambda huge: torch.where(huge.isinf(), torch.zeros_like(huge), huge),
        lambda huge: huge.argmax(-1, keepdim=True).to(huge.dtype),
    ],
)
def test_absorbed_overflow(function):
    found = located_body(absorbing(function), torch.float16)
    assert (found.origin, found.key.kind, found.key.module) == ("absorbed", "absorbed", "body")
    assert (op_of(found), found.first_bad.wider) == ("mul", "finite")
    assert found.first_bad.scalars == (60000.0,)
    assert found.reaches == ()


def masked_in_half(x):
    hidden = torch.arange(16, device=x.device) >= 12
    bias = hidden.to(x.dtype) * (1 + 0 * x.detach().abs().mean()) * -1e9
    return F.softmax(x @ x.transpose(-1, -2) + bias, -1) @ x


@pytest.mark.parametrize(
    "body",
    [
        *map(absorbing, (torch.tanh, torch.sigmoid, lambda huge: huge.clamp(-5, 5))),
        absorbing(lambda huge: torch.minimum(huge, torch.ones_like(huge))),
        absorbing(lambda huge: F.softmax(-huge, -1)),
        masked_in_half,
    ],
)
def test_an_overflow_that_changes_nothing_is_none(body):
    assert located_body(body, torch.float16) is None


def test_of_several_absorbed_those_that_change_something_are_told():
    def body(x):
        wide = masked_in_half(x) * 0 + 300
        return x + masked_in_half(x) * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))

    found = located_body(body, torch.float16)
    assert (op_of(found), len(found.absorbed)) == ("pow", 1)


def test_what_only_the_gradient_shows_is_absorbed_too():
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            wide = x * 0 + 300
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))
            return x + self.gate * normed * x

    found = located(Net(Gate(), torch.float16))
    assert (found.origin, op_of(found)) == ("absorbed", "pow")


def test_absorbed_under_a_checkpoint():
    def body(x):
        return checkpoint(masked_in_half, x, use_reentrant=False)

    assert located_body(body, torch.float16) is None


def test_absorbed_by_normalisation():
    def body(x):
        wide = x * 0 + 300
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))

    found = located_body(body, torch.float16)
    assert (found.origin, op_of(found)) == ("absorbed", "pow")
    assert [event.op for event in found.absorbed] == ["aten.pow.Tensor_Scalar"]


def test_overflow_of_the_scores_is_not_excused_by_the_mask_beside_it():
    causal = torch.full((16, 16), LOWEST).triu(1)

    def body(x):
        scores = (x.abs() + 1) @ (x.abs() + 1).transpose(-1, -2)
        return F.softmax((scores * 100 + 64000 + causal.half()) * 1e-3, -1) @ x

    found = located_body(body, torch.float16)
    assert op_of(found) == "add"
    assert found.first_bad.wider == "finite"


def masked_first_row(x):
    scores = (x @ x.transpose(-1, -2)).masked_fill((torch.arange(16) == 0)[:, None], -INF)
    return F.softmax(scores, -1) @ x


def test_decoy_rows_in_the_same_tensor():
    """Row 0 is NaN and left out; what fails is a logarithm in the rows beside it."""

    def body(x):
        joined = torch.cat([masked_first_row(x)[:, :1], torch.log(-x[:, 1:].abs())], 1) * 1.0
        return torch.cat([x[:, :1], joined[:, 1:]], 1)

    found = located_body(body)
    assert (op_of(found), found.key.module) == ("log", "body")


def test_decoy_rows_that_hide_the_birth():
    """The failing op itself reads a NaN in the row that is left out."""

    def body(x):
        spoiled = torch.log(masked_first_row(x) - 1e3)
        return torch.cat([x[:, :1], spoiled[:, 1:]], 1)

    found = located_body(body)
    assert (op_of(found), found.key.module) == ("log", "body")


def test_two_true_causes_name_the_first():
    found = located_body(lambda x: torch.sqrt(-x.abs() - 1) + torch.log(-x.abs()))
    assert op_of(found) == "sqrt"


def in_two_calls(x):
    parts = [torch.log(-part.abs()) for part in (x[:, :1], x[:, 1:])]
    return torch.cat(parts, 1) * 1.0


def test_place_that_fails_in_two_calls_is_put_right_in_both():
    found = located_body(in_two_calls)
    assert (op_of(found), found.confidence) == ("log", "certain")
    assert found.first_bad.inputs[0].shape[1] == 1


def test_decoy_at_the_place_of_the_birth():
    """What the first call gives is left out; that of the second one fails."""
    found = located_body(lambda x: torch.cat([x[:, :1], in_two_calls(x)[:, 1:]], 1))
    assert (op_of(found), found.confidence) == ("log", "certain")
    assert found.first_bad.inputs[0].shape[1] == 15


def test_failing_loss_comes_before_an_earlier_decoy_gradient():
    """Only the gradient meets the root of zero; the loss fails in the exponential."""

    def body(x):
        return x + torch.sqrt((x - x).abs())

    found = located(Net(body), lambda m, b: torch.exp(m(**b) + 1e3))
    assert (op_of(found), found.key.phase) == ("exp", "loss")


def test_fully_masked_by_half_arithmetic():
    mask = torch.full((16, 16), LOWEST).triu(1)
    mask[5] = LOWEST
    found = located_body(attention(mask, shift=30.0), torch.float16)
    assert (op_of(found), found.first_bad.fully_masked_rows) == ("_softmax", 2)


def test_loss_is_bad_and_gradients_are_not():
    found = located(Net(lambda x: x), lambda m, b: m(**b) + torch.tensor(NAN))
    assert (op_of(found), found.key.phase, found.reaches) == ("add", "loss", ("loss",))


def test_labels_of_padding_do_not_excuse_bad_logits():
    batch = planted.text_batch()
    batch["labels"] = batch["labels"].masked_fill(torch.arange(16) < 8, -100)
    found = located_body(lambda x: torch.where(x > -1e9, x / 0.0, x), batch=batch)
    assert op_of(found) == "div"


@pytest.mark.parametrize(
    "later",
    [
        torch.square,
        lambda x: F.relu(x).square(),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: x @ torch.full((8, 8), 8.0),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    ],
)
def test_op_that_fails_on_what_an_overflow_left_finite(later):
    """Most elements stay just below the limit and fail in the next op:
    it is no decoy that overflowed before.
    """
    grown = planted.Body(lambda x: torch.tanh(x) * 3e38 * 2.0)
    found = located_body(nn.Sequential(grown, planted.Body(later)))
    assert (op_of(found), found.key.module) == ("mul", "body.0")


@pytest.mark.parametrize(
    ("lowest", "made_by"), [(LOWEST, ["aten.add.Tensor"]), (-INF, [])], ids=["summed", "filled"]
)
def test_what_made_a_row_that_is_masked_throughout(lowest, made_by):
    hidden = torch.zeros(16, 16, dtype=torch.float16).masked_fill(CAUSAL, lowest)
    hidden[3] = lowest
    found = located_body(attention(hidden, shift=40.0), torch.float16)
    assert found.first_bad.fully_masked_rows > 0
    assert [event.op for event in found.masks] == made_by
