"""Failures of objectives as the issue trackers show them:
ratios, KL terms, empty denominators, rewards, adapters.
"""

import pytest
import torch
from torch.nn import functional as F

import planted
import tiny
from nanstop.records import Position, op_name
from planted import INF, NAN, located, op_of


def token_logps(model, batch):
    return model(input_ids=batch["input_ids"]).logits.log_softmax(-1)[..., 5]


def ratio_at_padding(model, batch):
    """Padded positions: exp(0 - (-200)) is inf, clamped in the forward pass, 0 x inf in the
    backward pass.
    """
    padding = (torch.arange(16) < 5).float().expand(2, 16) * torch.tensor([[1.0], [0.0]])
    new = token_logps(model, batch) * (1 - padding)
    old = torch.where(padding > 0, -200.0, new.detach())
    ratio = torch.exp(new - old)
    return -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * (1 - padding)).sum()


def exponential_kl(model, batch):
    reference = token_logps(model, batch).detach() + 800
    difference = reference - token_logps(model, batch)
    return (torch.exp(difference) - difference - 1).mean()


def completion_of_no_tokens(model, batch):
    mask = torch.ones(2, 16)
    mask[1] = 0
    average = (token_logps(model, batch) * mask).sum(-1) / mask.sum(-1)
    return -F.logsigmoid(average[0] - average[1])


def normaliser_of_zero(model, batch):
    mask = torch.zeros(2, 16)
    return (token_logps(model, batch) * mask).sum() / mask.sum()


def group_of_one(model, batch):
    rewards = torch.tensor([1.0])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return -(token_logps(model, batch).mean() * advantages).mean()


def odds_of_certainty(model, batch):
    logps = token_logps(model, batch) * 0
    return torch.log1p(-torch.exp(logps)).mean()


def suppressed_on_both_sides(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    kept = logits.masked_fill(torch.arange(64) < 3, -INF).log_softmax(-1)
    return F.kl_div(kept, kept.detach(), log_target=True)


@pytest.mark.filterwarnings("ignore:std\\(\\)", "ignore:reduction")
@pytest.mark.parametrize(
    ("loss", "op", "wider"),
    [
        (ratio_at_padding, "exp", "finite"),
        (exponential_kl, "exp", "nonfinite"),
        (completion_of_no_tokens, "div", "nonfinite"),
        (normaliser_of_zero, "div", "nonfinite"),
        (group_of_one, "std", "nonfinite"),
        (odds_of_certainty, "log1p", "nonfinite"),
        (suppressed_on_both_sides, "sub", "nonfinite"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_objective(loss, op, wider):
    found = located(tiny.llama(), loss)
    assert (op_of(found), found.key.module, found.first_bad.wider) == (op, "", wider)
    assert (found.origin, found.first_bad.source.function) == ("born_here", loss.__name__)
    assert found.key.phase in ("loss", "forward")


def test_ratio_at_padding_names_the_padded_tokens_and_no_loss():
    found = located(tiny.llama(), ratio_at_padding)
    assert found.positions == (Position(sample=0, first_token=0, last_token=4),)
    assert "loss" not in found.reaches


def test_reward_that_was_nan():
    batch = planted.text_batch() | {"rewards": torch.tensor([1.0, NAN])}
    found = located(
        tiny.llama(), lambda m, b: (token_logps(m, b).mean(1) * b["rewards"]).mean(), batch
    )
    assert (found.origin, found.culprit) == ("from_batch", "batch[rewards]")


def test_a_banned_vocabulary_is_not_what_was_bad():
    banned = torch.zeros(64)
    banned[40:] = -INF
    batch = planted.text_batch() | {"banned": banned}

    def smoothed(model, b, share):
        logps = (model(input_ids=b["input_ids"]).logits + b["banned"]).log_softmax(-1)
        wanted = torch.where(b["banned"] == 0, share, 0.0)
        return -(wanted * logps).sum(-1).mean()

    found = located(tiny.llama(), lambda m, b: smoothed(m, b, 0.01), batch)
    assert (found.origin, op_of(found)) == ("born_here", "mul")


def left_padded(kernel="eager"):
    model = tiny.llama()
    model.set_attn_implementation(kernel)
    mask = torch.full((16, 16), -INF).triu(1).repeat(2, 1, 1, 1)
    mask[0, :, :6] = -INF
    mask[0, :, :, :6] = -INF
    return model, planted.text_batch() | {"attention_mask": mask}


def test_padded_rows_poison_gradients_though_no_loss_reads_them():
    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[1].log_softmax(-1).mean()

    model, batch = left_padded()
    found = located(model, loss, batch)
    assert (op_of(found), found.key.module) == ("_softmax", "model.layers.0.self_attn")
    assert found.first_bad.fully_masked_rows == 12
    assert found.positions == (Position(sample=0, first_token=0, last_token=5),)
    assert "loss" not in found.reaches


def test_fused_attention_leaves_padded_rows_finite():
    model, batch = left_padded("sdpa")
    batch["labels"] = batch["labels"].masked_fill(torch.arange(16) < 8, -100)
    assert located(model, batch=batch) is None


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_dora_on_rows_of_zero():
    from peft import LoraConfig, get_peft_model

    model = tiny.llama()
    model.model.layers[1].self_attn.o_proj.weight.data[:3] = 0
    found = located(
        get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"], use_dora=True))
    )
    assert (op_of(found), found.key.kind) == ("div", "nan")
    assert ".layers.1.self_attn.o_proj" in found.key.module


def test_row_of_zeros_under_a_norm_without_epsilon():
    model = tiny.llama()
    model.model.embed_tokens.weight.data[planted.ids()[0, 3]] = 0
    model.model.layers[0].input_layernorm.variance_epsilon = 0.0
    found = located(model)
    assert (op_of(found), found.key.module) == ("rsqrt", "model.layers.0.input_layernorm")
    assert found.positions[0].sample == 0
    assert found.positions[0].first_token == 3


HIDDEN = torch.arange(64) < 60


def row_hidden_in_full(logits):
    hidden = HIDDEN | (torch.arange(16) == 3)[:, None]
    return torch.logsumexp(logits.masked_fill(hidden, -INF), -1).mean()


def row_hidden_in_full_in_one_line(logits):
    hidden = HIDDEN | (torch.arange(16) == 3)[:, None]
    return (logits.masked_fill(hidden, -INF).logsumexp(-1) - logits.logsumexp(-1)).mean()


def nearest_of_none(logits):
    return logits.masked_fill(HIDDEN | (torch.arange(16) == 3)[:, None], INF).amin(-1).mean()


def chosen_of_nothing(logits):
    kept = logits.masked_fill(HIDDEN | (torch.arange(16) == 3)[:, None], -INF)
    logps = kept - kept.logsumexp(-1, keepdim=True)
    return logps.exp().square().sum(-1).mean()


def less_the_largest_of_nothing(logits):
    kept = logits.masked_fill(HIDDEN | (torch.arange(16) == 3)[:, None], -INF)
    return (kept - kept.amax(-1, keepdim=True)).exp().square().sum(-1).mean()


def pooled_text_of_nothing(logits):
    pooled = logits.masked_fill(torch.tensor([False, True])[:, None, None], -INF).amax(1)
    return pooled.softmax(-1).square().mean()


def smoothed_over_hidden_labels(logits):
    kept = logits.masked_fill(HIDDEN, -INF)
    labels = torch.full((32,), 61)
    return F.cross_entropy(kept.flatten(0, 1), labels, label_smoothing=0.1)


def smoothed_by_hand(logits):
    kept = logits.masked_fill(HIDDEN, -INF).log_softmax(-1)
    rows, places = torch.arange(2)[:, None].expand(2, 16), torch.arange(16).expand(2, 16)
    return -0.9 * kept[..., 61].mean() - 0.1 * kept[rows, places].mean()


def label_that_is_hidden(logits):
    kept = logits.masked_fill(HIDDEN, -INF).flatten(0, 1)
    return F.cross_entropy(kept[1:], torch.full((31,), 7))


def action_that_is_hidden(logits):
    kept = logits.masked_fill(HIDDEN, -INF).log_softmax(-1)
    return -kept.gather(-1, torch.full((2, 16, 1), 7))[:, 1:].mean()


@pytest.mark.parametrize(
    ("loss", "op", "hidden"),
    [
        (row_hidden_in_full, "logsumexp", "row"),
        (row_hidden_in_full_in_one_line, "logsumexp", "row"),
        (nearest_of_none, "amin", "row"),
        (pooled_text_of_nothing, "amax", "row"),
        (chosen_of_nothing, "sub", "row"),
        (less_the_largest_of_nothing, "sub", "row"),
        (smoothed_over_hidden_labels, "sum", "counted"),
        (smoothed_by_hand, "mean", "counted"),
        (action_that_is_hidden, "gather", "chosen"),
        (label_that_is_hidden, "nll_loss_forward", "chosen"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_reads_a_hidden_choice_is_blamed_and_no_fill(loss, op, hidden):
    found = located(tiny.llama(), lambda m, b: loss(m(input_ids=b["input_ids"]).logits))
    assert (op_of(found), found.hidden, found.origin) == (op, hidden, "born_here")
    assert op_name(found.filled.op) == "masked_fill"
    assert (found.confidence, found.first_bad.source.function) == ("certain", loss.__name__)


@pytest.mark.parametrize("banned", [[2, 3], HIDDEN], ids=["by ids", "by a mask"])
def test_a_number_that_is_put_where_an_index_says_is_a_fill(banned):
    """A divergence of what is left: -inf - -inf, and with a number in one of them 0 * -inf."""
    teacher = tiny.llama(seed=1)

    def loss(model, batch):
        with torch.no_grad():
            target = teacher(input_ids=batch["input_ids"]).logits
        target[..., banned] = -INF
        logits = model(input_ids=batch["input_ids"]).logits.clone()
        logits[..., banned] = -INF
        logps, target = logits.log_softmax(-1), target.log_softmax(-1)
        return F.kl_div(logps, target, reduction="sum", log_target=True)

    found = located(tiny.llama(), loss)
    assert op_of(found) == "mul"
    assert found.filled.source.text == "target[..., banned] = -INF"


@pytest.mark.parametrize("lowest", [lambda x: x, lambda x: x * 0.5], ids=["as it is", "scaled"])
def test_a_fill_that_hides_no_choice_is_what_was_wrong(lowest):
    def loss(model, batch):
        kept = token_logps(model, batch).masked_fill(torch.arange(16) < 3, -INF)
        return lowest(kept).mean()

    found = located(tiny.llama(), loss)
    assert (op_of(found), found.hidden) == ("masked_fill", "")


def test_a_hidden_choice_that_a_mask_multiplies_is_born_at_the_product():
    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits
        kept = logits.masked_fill(HIDDEN, -INF).log_softmax(-1)
        answers = torch.arange(16) != 3
        chosen = kept.gather(-1, (54 * answers + 7).expand(2, 16)[..., None])[..., 0]
        return (chosen * answers).mean()

    found = located(tiny.llama(), loss)
    assert (op_of(found), found.hidden) == ("mul", "")
