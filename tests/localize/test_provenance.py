"""What values are by descent, however the script spells it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nanstop.localize.provenance import descents, kinds_of
from nanstop.tracing.recorder import Recorder

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -4.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0]])
LABELS = torch.tensor([[5, -100, -100], [7, 2, -100]])


def meaning(function, **names):
    """Return what ``function`` gives is, of tensors called as they are in a step."""
    known = {f"batch[{name}]": tensor for name, tensor in names.items()}
    binary = [name for name, t in known.items() if bool(((t == 0) | (t == 1)).all())]
    recorder = Recorder(nn.Module(), known)
    with recorder:
        result = function(*names.values())
    (value,) = recorder.values(result)
    trace = recorder.finish()
    return kinds_of(trace, descents(trace, binary), value, binary)


COUNTS = {
    "sum of a mask": lambda mask: mask.sum(-1).float(),
    "sum of a float mask": lambda mask: mask.float().sum(),
    "clamped": lambda mask: mask.float().sum(-1, keepdim=True).clamp(min=0.0),
    "share": lambda mask: mask.float().mean(-1),
    "of a comparison": lambda labels: (labels != -100).sum().float(),
    "of two masks": lambda labels: ((labels != -100) * (labels > 2)).float().sum(),
    "counted": lambda labels: labels.ne(-100).count_nonzero().float(),
    "scattered": lambda ids: torch.zeros(9).scatter_add(0, ids, torch.ones(3)),
    "bins": lambda ids: torch.bincount(ids, minlength=9).float(),
    "einsum of masks": lambda mask: torch.einsum("bi,bi->b", mask.float(), mask.float()),
    "one hot": lambda ids: F.one_hot(ids, 9).sum(0).float(),
    "one hot in floats": lambda ids: F.one_hot(ids, 9).float().sum(0),
    "squared": lambda mask: mask.float().sum(-1) ** 2,
    "a square": lambda mask: mask.sum(-1).float().square(),
    "rounded up and halved": lambda mask: (mask.sum(-1).float() + 1) / 2,
    "its reciprocal": lambda mask: mask.sum().float().reciprocal(),
    "cumulative": lambda mask: mask.float().cumsum(-1)[:, -1],
}
GIVEN = {"mask": MASK, "labels": LABELS, "ids": torch.tensor([0, 4, 4])}


@pytest.mark.parametrize("spelled", COUNTS)
def test_counts(spelled):
    (name,) = COUNTS[spelled].__code__.co_varnames[:1]
    assert "count" in meaning(COUNTS[spelled], **{name: GIVEN[name]})


NOT_WHOLE = {
    "share": lambda mask: mask.float().mean(-1),
    "weighted": lambda mask: (mask.float() * 0.05).sum(),
    "weights of their own": lambda mask: (mask * torch.full((3,), 0.3)).sum(),
    "halved": lambda mask: mask.sum().float() / 2,
}


@pytest.mark.parametrize("spelled", COUNTS | NOT_WHOLE)
def test_a_count_is_a_whole_number(spelled):
    function = (COUNTS | NOT_WHOLE)[spelled]
    name = function.__code__.co_varnames[0]
    is_share = spelled in NOT_WHOLE or spelled in ("rounded up and halved", "its reciprocal")
    assert ("whole" in meaning(function, **{name: GIVEN[name]})) is not is_share


LEFT_OF_A_NORM = {
    "one less": lambda x: 1 - x.square().sum(-1),
    "a tensor of ones less": lambda x: torch.ones(2) - x.norm(dim=-1),
    "less one": lambda x: x.abs().amax(-1) - 1.0,
    "two of them": lambda x: (1 - x.norm(dim=-1)) * (1 - x[:, :2].norm(dim=-1)),
}


@pytest.mark.parametrize("spelled", LEFT_OF_A_NORM)
def test_what_is_left_of_a_norm_is_none(spelled):
    found = meaning(LEFT_OF_A_NORM[spelled], x=X)
    assert not found & {"norm", "square", "extreme", "magnitude", "deviation"}


NORMS = {
    "less an eps": lambda x: x.norm(dim=-1) - 1e-8,
    "norm": lambda x: x.norm(dim=-1),
    "vector norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "root of squares": lambda x: (x * x).sum(-1).sqrt(),
    "power": lambda x: x.pow(2).sum(-1) ** 0.5,
    "square": lambda x: x.square().mean(-1) + 1e-6,
    "inverse root": lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "largest": lambda x: x.abs().amax(-1),
    "largest of two": lambda x: x.abs().max(-1).values,
    "sum of magnitudes": lambda x: x.abs().sum(),
    "deviation": lambda x: x.std(-1),
    "variance": lambda x: x.var(-1, keepdim=True) + 1e-5,
    "range": lambda x: x.amax(-1) - x.amin(-1),
    "product with itself": lambda x: (x @ x.T).diagonal().sqrt(),
    "dot": lambda x: x.flatten().dot(x.flatten()),
    "distance": lambda x: torch.cdist(x, x + 1),
    "inverse": lambda x: 1.0 / x.norm(dim=-1).clamp(min=1e-6),
    "in float16": lambda x: x.half().norm(dim=-1).float(),
}


@pytest.mark.parametrize("spelled", NORMS)
def test_norms(spelled):
    kinds = meaning(NORMS[spelled], x=X)
    assert "norm" in kinds
    assert ("deviation" in kinds) is (spelled in ("deviation", "variance"))
    assert "count" not in kinds
    assert "data" in kinds


@pytest.mark.parametrize("gain", [lambda x: 2**x, lambda x: torch.pow(2, x), lambda x: x**3])
def test_only_a_square_is_a_square(gain):
    assert meaning(lambda x: (gain(x.abs()) - 1).sum(-1), x=X).isdisjoint({"norm", "square"})
    assert "total" in meaning(lambda x: (gain(x) / torch.arange(2, 5).log2()).sum(-1), x=X)


PROBABILITIES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": lambda x: torch.sigmoid(x),
    "one minus": lambda x: 1 - torch.sigmoid(x),
    "exponential": lambda x: x.log_softmax(-1).exp(),
    "gathered": lambda x: x.softmax(-1)[:, :1].gather(1, torch.zeros(2, 1, dtype=torch.long)),
    "product": lambda x: x.softmax(-1)[:, 0] * x.sigmoid()[:, 1],
    "with an eps": lambda x: x.softmax(-1) + 1e-9,
    "masked": lambda x: x.softmax(-1) * torch.ones(3),
    "mean of experts": lambda x: (x.softmax(-1) + x.sigmoid()) / 2,
}


@pytest.mark.parametrize("spelled", PROBABILITIES)
def test_probabilities(spelled):
    assert "probability" in meaning(PROBABILITIES[spelled], x=X)


LOGARITHMS = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "log of softmax": lambda x: x.softmax(-1).log(),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "minus logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "summed": lambda x: x.log_softmax(-1).sum(-1),
    "averaged over tokens": lambda x: x.log_softmax(-1).sum(-1) / torch.ones(2, 3).sum(-1),
    "cross entropy": lambda x: -F.cross_entropy(x, torch.tensor([0, 1]), reduction="none"),
    "normal density": lambda x: torch.distributions.Normal(
        x, x.exp(), validate_args=False
    ).log_prob(torch.zeros(2, 3)),
    "complement": lambda x: torch.log1p(-x.sigmoid()),
    "minus the logarithm of summed exponentials": lambda x: x - x.exp().sum(-1, keepdim=True).log(),
    "the largest taken away and given back": lambda x: (
        x[:, 0] - (x.amax(-1) + (x - x.amax(-1, keepdim=True)).exp().sum(-1).log())
    ),
    "piece by piece": lambda x: in_pieces(x),
}


def in_pieces(logits):
    """Return the log-probability of the first, of logits that are read in pieces, as kernels do."""
    largest, total = torch.full((2,), -float("inf")), torch.zeros(2)
    for piece in logits.split(2, -1):
        larger = torch.maximum(largest, piece.amax(-1))
        total.mul_(torch.exp(largest - larger)).add_((piece - larger[:, None]).exp().sum(-1))
        largest.copy_(larger)
    return logits[:, 0] - (largest + total.log())


@pytest.mark.parametrize("spelled", LOGARITHMS)
def test_log_probabilities(spelled):
    assert "log_probability" in meaning(LOGARITHMS[spelled], x=X)


RATIOS = {
    "of two models": lambda x: x.log_softmax(-1) - (2 * x).log_softmax(-1),
    "to what was noted": lambda x, old: x.log_softmax(-1)[:, 0] - old,
    "k3": lambda x, old: old - x.log_softmax(-1)[:, 0],
    "clamped": lambda x, old: (x.log_softmax(-1)[:, 0] - old).clamp(max=20.0),
    "of whole answers": lambda x, old: (x.log_softmax(-1)[:, 0] - old).sum(),
}


@pytest.mark.parametrize("spelled", RATIOS)
def test_log_ratios(spelled):
    function = RATIOS[spelled]
    given = {"x": X} if function.__code__.co_argcount == 1 else {"x": X, "old": torch.ones(2)}
    assert "log_ratio" in meaning(function, **given)


NEITHER = {
    "difference": lambda x: x[:, 0] - x[:, 1],
    "product of two": lambda x: x[:, 0] * x[:, 1],
    "exponential": lambda x: x.exp(),
    "a layer": lambda x: x @ torch.ones(3, 3),
    "divergence of a normal code": lambda x: 1 + x - x.square() - x.exp(),
    "smoothed": lambda x: x.log_softmax(-1) - 0.1,
    "sum of values": lambda x: x.sum(-1),
    "their mean taken away": lambda x: x.log_softmax(-1) - x.log_softmax(-1).detach().mean(),
}


@pytest.mark.parametrize("spelled", NEITHER)
def test_what_is_none_of_them(spelled):
    kinds = meaning(NEITHER[spelled], x=X)
    assert kinds.isdisjoint({"count", "norm", "probability", "log_ratio", "mask"})


def test_a_mask_is_one_by_its_values():
    assert "mask" in meaning(lambda weights: weights.clone(), weights=torch.tensor([1.0, 0.0]))
    assert "mask" not in meaning(lambda mask: mask.clone(), mask=torch.tensor([0.5, 0.0]))


def test_constants_have_no_source():
    assert meaning(lambda x: torch.arange(3.0) * 2, x=X) == {"constant"}
    assert meaning(lambda x: torch.full((2,), 3.0), x=X) == {"constant"}


def test_a_slice_that_is_written_keeps_what_both_are():
    def body(x):
        table = torch.zeros(2, 3)
        table[:, :] = x.log_softmax(-1)
        return table.clone()

    assert "log_probability" in meaning(body, x=X)


def test_a_sum_over_no_element_is_told_and_still_what_it_is():
    none = torch.zeros(3, dtype=torch.bool)
    assert "empty" in meaning(lambda x, none: x[:, none].sum(), x=X, none=none)
    assert {"empty", "count"} <= meaning(
        lambda mask, none: mask[:, none].float().sum(), mask=MASK, none=none
    )
    assert "empty" not in meaning(lambda x: x.sum(), x=X)
