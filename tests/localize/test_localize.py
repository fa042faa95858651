"""Where a failure was born: op, module, phase, kind, origin, positions."""

import ctypes
import importlib
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planted
from nanstop.records import Position
from nanstop.tracing.source import holders
from planted import INF, NAN, Net, located, located_body, op_of

BORROWED = """
class Given:
    def __init__(self, given):
        self.given = given


class Later:
    def __init__(self):
        self.given = None

    def take(self, given):
        self.given = given
"""


def no_value_at_zero(x):
    return x / (x - x).sum()


def overflowing_product(x):
    return x * 1e38 * 1e4


def constant_nan(x):
    return x * float("nan")


def written_slice(x):
    y = x.clone()
    y[0, 3:5] /= y[0, 3:5] - y[0, 3:5]
    return y


def written_view(x):
    y = x.clone()
    y.view(-1, planted.HIDDEN)[3].log_()
    return y


def written_number(x):
    y = x.clone()
    y.data[0, 2] = NAN
    return y


def indexed_write(x):
    y = x.clone()
    y[[0, 1], [2, 3]] = torch.log(-x[[0, 1], [2, 3]].abs())
    return y


def scattered(x):
    where = torch.zeros(2, 16, 8, dtype=torch.long)
    return torch.zeros_like(x).scatter(1, where, torch.log(x - x))


def one_of_stack(x):
    first, second = x.unbind(0)
    return torch.stack([first, second.log()])


def one_of_cat(x):
    first, second = x.split(8, 1)
    return torch.cat([first, torch.stack([second[0], second[1] / (second[1] - second[1])])], 1)


def deviation_of_one(x):
    return x / x[:, :1, :1].std(-1, keepdim=True)


def zero_vector_normalised(x):
    zero = torch.zeros_like(x)
    return x + zero / zero.norm(dim=-1, keepdim=True)


def empty_mean(x):
    return x + x[:0].mean()


def infinity_then_zero(x):
    return torch.exp(x.abs() + 100) * torch.zeros_like(x) + x


def placeholder_read(x):
    buffer = x.new_full((2, 17, 8), NAN)
    buffer[:, :16] = x
    return buffer[:, 1:]


def dropped_infinity(x):
    return F.dropout(x * 1e38 * 1e5, 0.5, training=True)


def complex_overflow(x):
    pairs = torch.view_as_complex(x.reshape(2, 16, 4, 2).contiguous())
    return torch.view_as_real(pairs * 1e38 * 1e4).flatten(2)


def noise_turned_over(x):
    noise = -torch.log(-torch.log(torch.rand(x.shape).clamp(min=1.0)))
    return torch.softmax(x + noise, -1)


def scaled_by_log_of_position(x):
    scale = torch.log(torch.arange(16.0)) / math.log(64)
    scores = (x * scale.clamp(max=1)[None, :, None]) @ x.transpose(1, 2)
    return x + scores.mean(-1, keepdim=True)


def after_fourier(x):
    return torch.fft.irfft(torch.fft.rfft(x.log(), dim=1), n=16, dim=1)


BORN_FORWARD = [
    (no_value_at_zero, "div", "inf"),
    (overflowing_product, "mul", "inf"),
    (constant_nan, "mul", "nan"),
    (written_slice, "div_", "inf"),
    (written_view, "log_", "nan"),
    (written_number, "fill_", "nan"),
    (indexed_write, "log", "nan"),
    (scattered, "log", "inf"),
    (one_of_stack, "log", "nan"),
    (one_of_cat, "div", "inf"),
    (deviation_of_one, "std", "nan"),
    (zero_vector_normalised, "div", "nan"),
    (empty_mean, "mean", "nan"),
    (infinity_then_zero, "exp", "inf"),
    (placeholder_read, "new_full", "nan"),
    (dropped_infinity, "mul", "inf"),
    (complex_overflow, "mul", "inf"),
    (after_fourier, "log", "nan"),
    (noise_turned_over, "log", "inf"),
    (scaled_by_log_of_position, "log", "inf"),
]


@pytest.mark.parametrize(
    ("body", "op", "kind"), BORN_FORWARD, ids=lambda v: getattr(v, "__name__", v)
)
@pytest.mark.filterwarnings("ignore:std\\(\\)")
def test_forward_birth(body, op, kind):
    found = located_body(body)
    assert (found.origin, found.key.phase, found.key.module) == ("born_here", "forward", "body")
    assert op_of(found) == op
    assert found.key.kind.removeprefix("+").removeprefix("-") == kind
    assert found.first_bad.source.function == body.__name__
    assert found.reaches[0] == "loss"
    assert not found.blind_spots


def selected_on_its_own_line(x):
    return x + x[x > 1e9].mean()


def selected_before(x):
    chosen = x[x > 1e9]
    chosen = chosen * 2
    return x + chosen.mean()


@pytest.mark.parametrize(
    ("body", "line"), [(selected_on_its_own_line, None), (selected_before, "chosen = x[x > 1e9]")]
)
def test_the_line_that_left_nothing(body, line):
    found = located_body(body)
    assert op_of(found) == "mean"
    assert (found.emptied and found.emptied.source.text) == line


@pytest.mark.parametrize(
    ("body", "dtype", "wider"),
    [
        (lambda x: x * 60000 * 60000, torch.float16, "finite"),
        (lambda x: x * 1e38 * 1e4, torch.float32, "finite"),
        (lambda x: x * 1e38 * 1e4, torch.bfloat16, "finite"),
        (lambda x: (x * 1e5).to(torch.float8_e5m2).to(x.dtype), torch.float32, "finite"),
        (lambda x: torch.log(x - x), torch.float16, "nonfinite"),
        (lambda x: x / (x - x), torch.float32, "nonfinite"),
    ],
    ids=["fp16", "fp32", "bf16", "fp8", "log0", "div0"],
)
def test_wider_format_tells_overflow_from_undefined(body, dtype, wider):
    assert located_body(body, dtype).first_bad.wider == wider


def root_at_zero(x):
    return x + torch.sqrt((x - x).abs())


def unselected_log(x):
    return torch.where(x > 100, torch.log(x - x), x)


def unselected_exp(x):
    return torch.where(x > 100, torch.exp(x.abs() * 1e4 + 1e3), x)


def nan_replaced(x):
    return torch.nan_to_num((x - x).sqrt() / (x - x)) + x


@pytest.mark.parametrize(
    ("body", "op", "forward"),
    [
        (root_at_zero, "div", "aten.sqrt.default"),
        (unselected_log, "div", "aten.log.default"),
        (unselected_exp, "mul", "aten.exp.default"),
        (nan_replaced, "div", "aten.div.Tensor"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_backward_birth_is_placed_at_its_forward_op(body, op, forward):
    found = located_body(body)
    assert (found.origin, found.key.phase, found.key.module) == ("born_here", "backward", "body")
    assert (op_of(found), found.first_bad.forward_op) == (op, forward)
    assert found.first_bad.source.function == body.__name__
    assert "loss" not in found.reaches


def test_clamped_overflow_is_the_cause_of_the_gradient():
    found = located_body(lambda x: x + torch.exp(x.abs() + 200).clamp(max=2) * 0)
    assert (found.key.phase, op_of(found), found.first_bad.wider) == ("forward", "exp", "finite")
    assert "loss" not in found.reaches


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        doubled = grad * 2
        return doubled / (doubled - doubled)


def test_custom_backward_is_named_by_its_own_line():
    found = located_body(BadBackward.apply)
    assert (found.key.phase, op_of(found), found.key.module) == ("backward", "div", "body")
    assert found.first_bad.source.text == "return doubled / (doubled - doubled)"
    assert found.first_bad.forward_op == "BadBackward"


def overflow_in_loss(model, batch):
    return torch.exp(model(**batch) + 1e3)


def items_are_none(model, batch):
    return model(**batch) * 0 / torch.tensor(0.0)


def logits_of(model, batch):
    return model.head(model.body(model.proj(model.embed(batch["input_ids"]))))


def nothing_supervised(model, batch):
    return F.cross_entropy(logits_of(model, batch).flatten(0, 1), torch.full((32,), -100))


def suppressed_tokens(model, batch):
    kept = logits_of(model, batch).masked_fill(torch.arange(64) < 3, -INF).log_softmax(-1)
    return F.kl_div(kept, kept.detach(), log_target=True, reduction="sum")


def not_scalar(model, batch):
    return (model(**batch) * NAN).reshape(1)


@pytest.mark.parametrize(
    ("loss", "op", "phase"),
    [
        (overflow_in_loss, "exp", "loss"),
        (items_are_none, "div", "loss"),
        (not_scalar, "mul", "loss"),
        (nothing_supervised, "nll_loss_forward", "forward"),
        (suppressed_tokens, "sub", "forward"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_birth_outside_the_module(loss, op, phase):
    found = located(Net(lambda x: x), loss)
    assert (found.key.module, op_of(found), found.key.phase) == ("", op, phase)
    assert found.first_bad.source.function == loss.__name__


def numpy_write(x):
    y = x.clone()
    y.detach().numpy()[0, 3] = NAN
    return y * 2


def raw_memory_write(x):
    y = x.clone()
    ctypes.memset(y.data_ptr() + 4 * planted.HIDDEN * 3, 255, 4)
    return y * 2


@pytest.mark.parametrize("body", [numpy_write, raw_memory_write])
def test_value_written_outside_any_op(body):
    found = located_body(body)
    assert (found.origin, found.key.module, op_of(found)) == ("unknown", "body", "mul")
    assert found.positions == (Position(sample=0, first_token=3, last_token=3),)
    assert any("outside any operation" in spot for spot in found.blind_spots)


def test_constant_array_is_named_at_its_reader():
    spoiled = torch.from_numpy(np.array([1, NAN, 1, 1, 1, 1, 1, 1], dtype="float32"))
    found = located_body(lambda x: x * spoiled)
    assert (found.origin, found.culprit, op_of(found)) == ("from_constant", "spoiled", "mul")


def test_infinity_that_a_variable_held_is_named_at_the_op_that_makes_nan_of_it():
    rarity = 1.0 / torch.tensor([4.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    found = located_body(lambda x: (x * 0.0) * rarity)
    assert (found.origin, op_of(found), found.held_in) == ("born_here", "mul", "rarity")
    assert found.held_at.text.startswith("rarity = 1.0 / torch.tensor(")


def test_what_a_library_object_was_given_later_has_no_line_of_the_object(tmp_path, monkeypatch):
    (tmp_path / "borrowed_kept.py").write_text(BORROWED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(holders, "is_library", lambda file: "borrowed_kept" in file)
    borrowed = importlib.import_module("borrowed_kept")
    rarity = 1.0 / torch.tensor([4.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    kept = borrowed.Given({"scale": rarity.clone()})
    found = located_body(lambda x: (x * 0.0) * kept.given["scale"])
    assert (found.held_in, found.held_at.text.partition(" = ")[0]) == (
        "kept.given['scale']",
        "kept",
    )
    later = borrowed.Later()
    later.take({"scale": rarity.clone()})
    found = located_body(lambda x: (x * 0.0) * later.given["scale"])
    assert found.held_at is None


@pytest.mark.parametrize("name", ["proj.weight", "embed.weight", "head.bias"])
def test_parameter_was_bad_before(name):
    model = Net(lambda x: x)
    with torch.no_grad():
        model.get_parameter(name).fill_(NAN)
    found = located(model)
    assert (found.origin, found.culprit, found.key.kind) == ("from_param", name, "nan")
    assert found.key.module == name.rpartition(".")[0]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_parameter_of_a_model_beside_the_trained_one_was_bad_before(bad):
    reference = nn.Sequential(nn.Embedding(planted.VOCAB, planted.HIDDEN), nn.RMSNorm(8))
    with torch.no_grad():
        reference[0].weight[planted.ids()[1, 4]] = bad

    def loss(model, batch):
        return model(**batch) + reference(batch["input_ids"]).mean()

    found = located(Net(lambda x: x), loss)
    assert (found.origin, found.of_another_model) == ("from_param", True)
    assert (found.culprit, found.key.module) == ("Sequential.0.weight", "Sequential.0")
    assert found.blind_spots == ()
    model = Net(lambda x: x)
    with torch.no_grad():
        model.embed.weight.fill_(NAN)
    assert not located(model).of_another_model


def test_a_model_that_the_roots_own_call_runs_is_beside_it():
    """A trainer runs its whole loss inside the model's call, for wrappers that gather weights."""
    teacher = nn.Sequential(nn.Embedding(planted.VOCAB, planted.HIDDEN), nn.Linear(8, 8))
    with torch.no_grad():
        teacher[1].bias[3] = NAN
    model = Net(lambda x: x)
    plain = model.forward

    def distilled(**batch):
        return plain(**batch) + teacher(batch["input_ids"]).mean()

    model.forward = distilled
    found = located(model)
    assert (found.origin, found.of_another_model) == ("from_param", True)
    assert (found.culprit, found.key.module) == ("Sequential.1.bias", "Sequential.1")
    assert found.blind_spots == ()


def test_tied_row_is_found_under_its_first_name():
    model = Net(lambda x: x)
    model.head.weight = model.embed.weight
    with torch.no_grad():
        model.embed.weight[planted.ids()[1, 4]] = NAN
    found = located(model)
    assert (found.origin, found.culprit, found.key.module) == (
        "from_param",
        "embed.weight",
        "embed",
    )
    assert Position(sample=1, first_token=4, last_token=4) in found.positions


def test_buffer_was_bad_before():
    model = Net(nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (2, 16)))).eval()
    model.body[1].running_var.fill_(NAN)
    found = located(model)
    assert (found.origin, found.culprit) == ("from_buffer", "body.1.running_var")
    assert found.key.module == "body.1"


def test_batch_was_bad_before():
    data = torch.randn(4, 8)
    data[1] = NAN
    found = located(nn.Linear(8, 1), lambda m, b: m(b["x"]).mean(), {"x": data})
    assert (found.origin, found.culprit) == ("from_batch", "batch[x]")


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.transpose(1, 2) @ torch.ones(16, 8),
        lambda x: F.conv1d(x, torch.ones(8, 8, 3)),
        lambda x: F.layer_norm(x, (16,)),
        lambda x: x * 0.0,
        lambda x: x - x.amax(-1, keepdim=True),
    ],
    ids=["product", "convolution", "norm", "mask", "difference"],
)
def test_rows_of_data_that_are_minus_infinity_throughout_are_no_mask(body):
    """The logarithm of a silent clip: all of its rows, and none of the others."""
    data = torch.randn(2, 8, 16)
    data[1] = -INF
    model = planted.Body(lambda x: x * 1.0)
    found = located(model, lambda m, b: m(body(b["x"])).mean(), {"x": data})
    assert (found.origin, found.culprit) == ("from_batch", "batch[x]")


def test_nested_batch_entry_has_a_path():
    data = {"vision": {"pixels": [torch.zeros(4, 8), torch.full((4, 8), INF)]}}
    found = located(nn.Linear(8, 1), lambda m, b: m(b["vision"]["pixels"][1]).mean(), data)
    assert (found.origin, found.culprit) == ("from_batch", "batch[vision.pixels.1]")


def test_module_used_twice_fails_in_its_second_use():
    model = Net(lambda x: x)
    with torch.no_grad():
        model.proj.weight.fill_(1e25)
    found = located(model, lambda m, b: m.head(m.proj(m.proj(m.embed(b["input_ids"])))).mean())
    events = [event.module for event in found.growth]
    assert (found.key.module, found.first_bad.wider) == ("proj", "finite")
    assert events == ["proj"]


def test_fully_masked_row_and_its_positions():
    mask = torch.full((16, 16), -INF).triu(1)
    mask[5] = -INF
    found = located_body(lambda x: F.softmax(x @ x.transpose(-1, -2) + mask, -1) @ x)
    assert (op_of(found), found.first_bad.fully_masked_rows) == ("_softmax", 2)
    assert found.positions == tuple(
        Position(sample=row, first_token=5, last_token=5) for row in (0, 1)
    )


def test_fully_masked_row_of_a_mask_in_the_batch():
    mask = torch.full((16, 16), -INF).triu(1)
    mask[5] = -INF
    batch = planted.text_batch() | {"mask": mask}

    def loss(model, b):
        x = model.proj(model.embed(b["input_ids"]))
        weights = F.softmax(x @ x.transpose(-1, -2) + b["mask"], -1)
        return model.head(weights @ x).mean()

    found = located(Net(lambda x: x), loss, batch)
    assert (found.origin, op_of(found), found.first_bad.fully_masked_rows) == (
        "born_here",
        "_softmax",
        2,
    )


def test_a_row_that_hides_all_in_one_sample_is_not_in_all_that_hide_some():
    """A softmax by hand, where -Inf is taken from -Inf in one row and from a number elsewhere."""
    hidden = torch.full((16, 16), -INF).triu(1).repeat(2, 1, 1)
    hidden[1, 5] = -INF

    def body(x):
        scores = x @ x.transpose(-1, -2) + hidden
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True) @ x

    found = located_body(body)
    assert (op_of(found), found.positions, found.in_every_sample) == ("sub", None, False)


def test_gradient_overflow_in_half():
    model = nn.Linear(8, 8).half()
    data = {"x": torch.randn(4, 8)}
    found = located(model, lambda m, b: m(b["x"].half()).float().square().sum() * 3e4, data)
    assert (found.key.phase, op_of(found), found.first_bad.wider) == (
        "backward",
        "_to_copy",
        "finite",
    )
    assert found.reaches == ("weight", "bias")


def test_gradient_that_overflows_while_it_accumulates():
    model = Net(lambda x: x).half()
    large = torch.full((2, 16, 8), 40000.0, dtype=torch.float16)

    def loss(m, b):
        x = m.proj(m.embed(b["input_ids"]))
        x = x - x.detach()
        return (x * large).float().sum() + (x * large).float().sum()

    found = located(model, loss)
    assert (found.origin, found.key.phase) == ("born_here", "backward")
    assert found.first_bad.wider == "finite"


def test_sparse_gradient():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * INF

    model = nn.Embedding(64, 8, sparse=True)
    found = located(
        model, lambda m, b: Halved.apply(m(b["input_ids"])).sum(), {"input_ids": planted.ids()}
    )
    assert (found.key.phase, op_of(found), found.reaches) == ("backward", "mul", ("weight",))


def test_second_backward_call():
    def loss(model, batch):
        model(**batch).backward()
        x = model.proj(model.embed(batch["input_ids"]))
        return (x - x).sqrt().sum()

    found = located(Net(lambda x: x), loss)
    assert (found.key.phase, found.first_bad.forward_op) == ("backward", "aten.sqrt.default")


def test_gradient_penalty():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(m, b):
        x = (b["x"] * 0).requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum() * 0, x, create_graph=True)
        return slope.norm(dim=-1).sqrt().mean()

    found = located(model, loss, {"x": torch.randn(4, 8)})
    assert (found.key.phase, found.first_bad.forward_op) == ("backward", "aten.sqrt.default")


def test_id_out_of_range():
    batch = planted.text_batch()
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 3] = 64
    found = located(Net(lambda x: x), batch=batch)
    assert (found.key.kind, op_of(found), found.key.module) == ("exception", "embedding", "embed")
    assert found.reaches == ("exception",)


def test_exception_of_python_has_no_op():
    def loss(model, batch):
        raise ValueError("no")

    found = located(Net(lambda x: x), loss)
    assert (found.first_bad, found.origin, found.key.op) == (None, "unknown", "ValueError")


def test_sampling_from_bad_probabilities():
    model = Net(overflowing_product)

    def loss(m, b):
        with torch.no_grad():
            x = m.head(m.body(m.proj(m.embed(b["input_ids"]))))
            torch.multinomial(x[:, -1].softmax(-1), 1)
        return torch.zeros((), requires_grad=True) * 1

    found = located(model, loss, phase="generate")
    assert (found.key.phase, op_of(found), found.key.module) == ("generate", "mul", "body")
    assert found.reaches == ("exception",)


@pytest.mark.parametrize("phase", ["generate", "evaluate"])
def test_what_reads_rows_that_are_hidden_is_known_outside_of_training_too(phase):
    def loss(m, b):
        with torch.no_grad():
            x = m.head(m.proj(m.embed(b["input_ids"])))[:, -1]
            torch.multinomial(torch.full_like(x, -INF).softmax(-1), 1)
        return torch.zeros((), requires_grad=True) * 1

    found = located(Net(lambda x: x), loss, phase=phase)
    assert (op_of(found), found.first_bad.read_by) == ("_softmax", ("multinomial",))


def test_growth_chain_is_oldest_first():
    found = located_body(lambda x: (x * 100).relu().mul(1e20).mul(1e15) * 1e10)
    assert [(event.op, event.scalars) for event in found.growth] == [
        ("aten.mul.Tensor", (100.0,)),
        ("aten.mul.Tensor", (1e20,)),
        ("aten.mul.Tensor", (1e15,)),
    ]


def test_uninitialised_memory_is_named_where_it_was_taken():
    """Deterministic mode fills new memory with NaN:
    what a real run reads there is whatever was left.
    """

    def body(x):
        room = torch.empty(2, 17, 8)
        room[:, :16] = x
        return room[:, 1:]

    torch.use_deterministic_algorithms(True)
    try:
        found = located_body(body)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (op_of(found), found.key.module) == ("empty", "body")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_memory_that_an_unseen_kernel_writes_is_no_birth_of_what_takes_it(value):
    """NumPy stands for a Triton kernel: it writes where no operation is dispatched."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            y = torch.empty_like(x)
            y.numpy()[...] = value
            return y

        @staticmethod
        def backward(_ctx, grad):
            return grad

    found = located_body(Kernel.apply)
    assert (op_of(found), found.key.module, found.origin) == ("empty_like", "body", "unknown")
    assert found.first_bad.source.text == "y.numpy()[...] = value"
    assert found.unseen_write == "nonfinite"
    assert found.blind_spots
