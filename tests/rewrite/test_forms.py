"""Statements rewritten: what they become, and that it is the same function on random values."""

import pytest
import torch

from nanstop.records import Atom, OpEvent, Proof, SourceLine, TensorStats
from nanstop.rewrite.forms.form_code import codes_of, form_edits
from nanstop.rewrite.source import Source, edited

HEAD = """\
import math, torch
import torch.nn.functional as F
from torch import nn


"""


def rewritten(text, line, form="stable_form", op="", dtype="float32", **given):
    """The text with the statement at ``line`` (or that holds that text) in another form."""
    if isinstance(line, str):
        line = next(n for n, one in enumerate(text.splitlines(), 1) if line in one)
    stats = TensorStats(shape=(2,), dtype=dtype, **given.get("read", {}))
    descent, scalars = given.get("descent", ()), given.get("scalars", ())
    num_read = 1 if scalars else max(len(descent), 2)
    event = OpEvent(
        index=0,
        phase="forward",
        op=f"aten.{op}.Tensor",
        module="",
        source=SourceLine(file="x.py", line=line, function="f"),
        inputs=(stats,) * num_read,
        outputs=(TensorStats(shape=(2,), dtype=dtype, posinf=given.get("inf", 0)),),
        scalars=scalars,
        descent=descent,
    )
    atom = Atom(remedy=form, target=f"x.py:{line}", value=given.get("value", ""))
    return edited(text, form_edits(Source(text), line, atom, event if op else None))


def body(lines):
    return HEAD + "def f(x, y):\n" + "".join(f"    {line}\n" for line in lines.splitlines())


def outcome(text, x, y):
    """The function's value and its gradient with respect to x."""
    space = {}
    exec(text, space)
    x = x.clone().requires_grad_()
    result = space["f"](x, y)
    (result.sum() if result.dim() else result).backward()
    return result.detach(), x.grad


LOG_SPACE = {
    "return torch.log(F.softplus(x * y)).mean()": (
        "raw = x * y\n"
        "    return torch.where(raw < -20, raw, torch.log(F.softplus(raw.clamp(min=-20)))).mean()"
    ),
    "return torch.exp(x).mean().log() * y.sum()": (
        "return (torch.logsumexp(x.flatten(), 0) - math.log(x.numel())) * y.sum()"
    ),
    "return torch.log((x * y).exp().mean(1, keepdim=True)).mean()": (
        "logs = x * y\n"
        "    return (torch.logsumexp(logs, 1, keepdim=True) - math.log(logs.shape[1])).mean()"
    ),
    "return y * x.exp() / (1 + x.exp())": "return y * torch.sigmoid(x)",
    "return torch.exp(x) * (y + 1) / x.exp().sum(-1, keepdim=True)": (
        "return (y + 1) * torch.softmax(x, dim=-1)"
    ),
    "return torch.log(torch.cumsum(torch.exp(x), dim=1)).mean()": (
        "return torch.logcumsumexp(x, dim=1).mean()"
    ),
    "return torch.log((y.abs() * torch.exp(x)).sum(-1))": (
        "return torch.logsumexp(torch.log(y.abs()) + x, -1)"
    ),
    "cum = torch.cumsum(x.exp().flip(1), 1).flip(1)\nreturn torch.log(cum + 1e-10) - x": (
        "cum = torch.cumsum(x.exp().flip(1), 1).flip(1)\n"
        "    return (F.softplus(torch.logcumsumexp(x.flip(1), 1).flip(1) + 23.02585) - 23.02585)"
        " - x"
    ),
    "return torch.log(torch.special.i0(x * y)).mean()": (
        "grown = x * y\n    return (torch.log(torch.special.i0e(grown)) + grown.abs()).mean()"
    ),
    "p = x.softmax(-1)\nreturn torch.special.entr(p).sum() + torch.xlogy(y, p).sum()": (
        "p = x.softmax(-1)\n"
        "    return (-(p * x.log_softmax(-1))).sum() + (y * x.log_softmax(-1)).sum()"
    ),
    "return torch.log(0.5 * (1 + torch.erf(x))).mean()": (
        "return (-0.6931471805599453 + 0.6931471805599453 "
        "+ torch.special.log_ndtr(1.4142135623730951 * x)).mean()"
    ),
    "return (1 - y.erf()).log() + x.erfc().log()": (
        "return (0.6931471805599453 + torch.special.log_ndtr(-1.4142135623730951 * y)) "
        "+ (0.6931471805599453 + torch.special.log_ndtr(-1.4142135623730951 * x))"
    ),
    "return -(1 / (1 + torch.exp(-x))).log() - (1 / (1 + torch.exp(x * y))).log()": (
        "return -F.logsigmoid(x) - F.logsigmoid(-(x * y))"
    ),
    "return (1 / x.exp()).log() + ((x.exp() + y.exp()) / 2).log()": (
        "return (-x) + (torch.logaddexp(x, y) - 0.6931471805599453)"
    ),
    "d = y.exp() * math.sqrt(2 * math.pi)\nreturn torch.log((torch.exp(-x**2) / d).sum(-1))": (
        "d = y.exp() * math.sqrt(2 * math.pi)\n"
        "    return torch.logsumexp(-x**2 - (y + 0.9189385332046727), -1)"
    ),
    "e, axis = torch.exp(x), -1\nreturn torch.exp(x) / torch.exp(x).sum(axis, keepdim=True)": (
        "e, axis = torch.exp(x), -1\n    return torch.softmax(x, dim=axis)"
    ),
    "i = torch.tensor([[0], [2]])\np = x.softmax(-1).gather(-1, i).squeeze(-1)\n"
    "return -torch.log(1 - p).mean()": (
        "i = torch.tensor([[0], [2]])\n    p = x.softmax(-1).gather(-1, i).squeeze(-1)\n"
        '    return -(x.scatter(-1, i, float("-inf")).logsumexp(-1, True)'
        " - x.logsumexp(-1, True)).squeeze(-1).mean()"
    ),
    "return -(x.exp().diag() / x.exp().sum(1)[:2]).log().mean()": (
        "return -(x.diag() - torch.logsumexp(x, 1)[:2]).mean()"
    ),
    "return torch.log(torch.cosh(x - y)).mean()": (
        "away = x - y\n    return (away + F.softplus(-2 * away) - 0.6931471805599453).mean()"
    ),
    "return torch.log(torch.expm1(y + x.abs())).mean()": (
        "grown = y + x.abs()\n    return (grown + torch.log(-torch.expm1(-grown))).mean()"
    ),
    "return torch.log(torch.exp(x) + torch.exp(y)).sum()": ("return torch.logaddexp(x, y).sum()"),
    "return (torch.exp(x) / (torch.exp(y) + torch.exp(x))).sum()": (
        "return (torch.sigmoid(x - y)).sum()"
    ),
    "return torch.log(1 - torch.tanh(x).pow(2))": (
        "return 2 * (0.6931471805599453 - x - F.softplus(-2 * x))"
    ),
    "return torch.where(y > 0, x.sigmoid(), 1 - x.sigmoid()).log()": (
        "return torch.where(y > 0, F.logsigmoid(x), F.logsigmoid(-x))"
    ),
    "return torch.log(torch.softmax(x, -1))": "return torch.log_softmax(x, -1)",
    "return torch.log(F.softmax(x, dim=-1))": "return F.log_softmax(x, dim=-1)",
    "return F.softmax(x, dim=-1).log()": "return F.log_softmax(x, dim=-1)",
    "return x.softmax(-1).log()": "return x.log_softmax(-1)",
    "return torch.log(nn.Softmax(dim=-1)(x))": "return F.log_softmax(x, dim=-1)",
    "return torch.log(input=torch.softmax(x / 2, -1))": "return torch.log_softmax(x / 2, -1)",
    "return torch.log2(torch.softmax(x, -1))": (
        "return torch.log_softmax(x, -1) / 0.6931471805599453"
    ),
    "return torch.log(torch.sigmoid(x))": "return F.logsigmoid(x)",
    "return x.sigmoid().log()": "return F.logsigmoid(x)",
    "return torch.log(1 - torch.sigmoid(x))": "return F.logsigmoid(-x)",
    "return torch.log1p(-torch.sigmoid(x - 1))": "return F.logsigmoid(-(x - 1))",
    "return (1.0 - x.sigmoid()).log()": "return F.logsigmoid(-x)",
    "return F.binary_cross_entropy(torch.sigmoid(x), y)": (
        "return F.binary_cross_entropy_with_logits(x, y)"
    ),
    'return F.binary_cross_entropy(x.sigmoid(), y, reduction="sum")': (
        'return F.binary_cross_entropy_with_logits(x, y, reduction="sum")'
    ),
    "return nn.BCELoss()(torch.sigmoid(x), y)": "return F.binary_cross_entropy_with_logits(x, y)",
    "return torch.exp(x) / torch.exp(y)": "return torch.exp(x - y)",
    "return x.exp() / (y * 2).exp()": "return torch.exp(x - (y * 2))",
    "return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)": "return torch.softmax(x, dim=-1)",
    "return 1 / (1 + torch.exp(-x))": "return torch.sigmoid(x)",
    "return 1.0 / (1.0 + torch.exp(x))": "return torch.sigmoid(-x)",
    "return torch.exp(x) / (1 + torch.exp(x))": "return torch.sigmoid(x)",
    "return torch.log(torch.exp(x).sum(-1))": "return torch.logsumexp(x, -1)",
    "return torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))": (
        "return torch.logsumexp(x, dim=-1, keepdim=True)"
    ),
    "return x.exp().sum().log()": "return torch.logsumexp(x.flatten(), 0)",
    "return torch.log(1 + torch.exp(x))": "return F.softplus(x)",
    "return torch.log1p(torch.exp(x))": "return F.softplus(x)",
    "return torch.log(torch.softmax(x, -1).prod(-1))": "return torch.log_softmax(x, -1).sum(-1)",
    "return torch.log(torch.sigmoid(x) * torch.sigmoid(-x))": (
        "return F.logsigmoid(x) + F.logsigmoid(-x)"
    ),
    "return torch.log(torch.softmax(x, -1) / torch.softmax(y, -1))": (
        "return torch.log_softmax(x, -1) - torch.log_softmax(y, -1)"
    ),
    "return torch.log(torch.sigmoid(x) ** 2) * 3": "return (2 * F.logsigmoid(x)) * 3",
    "return torch.log(torch.softmax(x, -1)[:, 0])": "return torch.log_softmax(x, -1)[:, 0]",
    "return -torch.log((torch.softmax(x, -1)[..., 1]))": "return -torch.log_softmax(x, -1)[..., 1]",
    "return torch.log(x.softmax(-1).gather(1, torch.tensor([[0], [1]])))": (
        "return x.log_softmax(-1).gather(1, torch.tensor([[0], [1]]))"
    ),
    "return -(y * torch.log(x.softmax(-1)) + (1 - y) * torch.log(1 - x.sigmoid())).sum()": (
        "return -(y * x.log_softmax(-1) + (1 - y) * F.logsigmoid(-x)).sum()"
    ),
    "p = torch.softmax(x, -1)\nreturn -(p * torch.log(p)).sum(-1)": (
        "p = torch.softmax(x, -1)\n    return -(p * torch.log_softmax(x, -1)).sum(-1)"
    ),
    "e = torch.exp(x)\nreturn e / e.sum(-1, keepdim=True)": (
        "e = torch.exp(x)\n    return torch.softmax(x, dim=-1)"
    ),
    "p = torch.softmax(x, -1)\np = p * 0.5\nreturn torch.log(p)": (
        "p = torch.softmax(x, -1)\n    p = p * 0.5\n"
        "    return torch.log_softmax(x, -1) - 0.6931471805599453"
    ),
    "z = x * 2\np = torch.sigmoid(z)\nq = 1 - p\nreturn torch.log(q)": (
        "z = x * 2\n    p = torch.sigmoid(z)\n    q = 1 - p\n    return F.logsigmoid(-z)"
    ),
    "p = torch.softmax(F.dropout(x, 0.0), -1)\nreturn torch.log(p)": (
        "p_input = F.dropout(x, 0.0)\n    p = torch.softmax(p_input, -1)\n"
        "    return torch.log_softmax(p_input, -1)"
    ),
}


@pytest.mark.parametrize("before", LOG_SPACE)
def test_log_space(before):
    after = rewritten(body(before), len(body(before).splitlines()))
    assert after == body("").removesuffix("    \n") + f"    {LOG_SPACE[before]}\n"
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(2, 3, generator=generator)
        y = torch.rand(2, 3, generator=generator)
        for one, other in zip(outcome(body(before), x, y), outcome(after, x, y), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "before",
    [
        "return torch.log(1 - torch.exp(x))",
        "return torch.log1p(-torch.exp(x))",
        "p = torch.exp(-x.abs())\nreturn torch.log(1 - p)",
        "return torch.stack([torch.log(1 - torch.exp(one)) for one in x])",
    ],
)
def test_both_halves_of_log_of_the_rest_are_written(before):
    after = rewritten(body(before), len(body(before).splitlines()))
    x = -torch.logspace(-12, 1.9, 60)
    p = x.double().exp()
    exact = torch.log1p(-p).where(x < -1, torch.log(-torch.expm1(x.double()))), p / torch.expm1(x)
    for found, expected in zip(outcome(after, x, None), exact, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=0.0)


def test_log_space_holds_where_the_plain_form_does_not():
    for before in ("return torch.log(torch.softmax(x, -1))", "return torch.log(torch.sigmoid(x))"):
        x = torch.tensor([[300.0, -300.0, 0.0]])
        after = rewritten(body(before), len(body(before).splitlines()))
        assert not outcome(body(before), x, x)[0].isfinite().all()
        assert all(one.isfinite().all() for one in outcome(after, x, x))


ALONE = [
    "return torch.log(x)",
    "return torch.log(x + 1e-6)",
    "return torch.log(torch.softmax(x, -1) + 1e-3)",
    "return torch.log(torch.softmax(x, -1).clamp(min=1e-3))",
    "return torch.log(torch.relu(x))",
    "return torch.log(x * y)",
    "return x / y",
    "return torch.exp(x) / torch.exp(y).sum(-1, keepdim=True)",
    "return torch.exp(x) / torch.exp(x).sum(-1)",
    "return F.binary_cross_entropy(x, y)",
    "p = torch.softmax(x, -1)\nx = x * 2\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\np = p - y\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\nq = p * 0.5\nx = x * 2\nreturn torch.log(q)",
    "p = torch.softmax(x, -1)\np[0] = 0.5\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\np.clamp_(min=0.1)\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\np += 1\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\nx.mul_(2)\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\nx.view(-1)[0] = 2\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\nif y.sum() > 0:\n    p = y\nreturn torch.log(p)",
    "if y.sum() > 0:\n    p = torch.softmax(x, -1)\nelse:\n    p = y\nreturn torch.log(p)",
    "p = y\nfor p in (p, torch.softmax(x, -1)):\n    pass\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\nfor x in (y,):\n    pass\nreturn torch.log(p)",
    "p = torch.softmax(x, -1)\nh = [torch.log(p) for p in y]\nreturn torch.log(h[0])",
    "p = torch.softmax(x, -1)\nreturn [torch.log(p) for p in y][0]",
    "p = torch.softmax(x, -1)\nreturn (p := y).sum() + torch.log(p)",
    "p, q = torch.softmax(x, -1), y\nreturn torch.log(p)",
    "with torch.no_grad():\n    p = torch.softmax(x, -1)\nreturn torch.log(p)",
    "def g(p):\n    return torch.log(p)\nreturn g(torch.softmax(x, -1))",
    "torch = FAKE\nreturn torch.log(torch.softmax(x, -1))",
]


@pytest.mark.parametrize("before", ALONE)
def test_what_is_not_known_to_be_the_same_is_left_alone(before):
    text = body(before)
    for line in range(7, 7 + len(before.splitlines())):
        assert rewritten(text, line) == text


@pytest.mark.parametrize(
    "head",
    [
        "from common import *\n",
        "from .common import torch\n",
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
    ],
)
@pytest.mark.parametrize("op", ["sqrt", "log"])
def test_a_function_of_what_may_be_a_module_is_no_method(head, op):
    text = f"{head}def f(x, y):\n    return torch.{op}(x * y)\n"
    assert rewritten(text, f"torch.{op}", "form", op) == text


def test_a_method_of_what_the_file_binds_is_one():
    text = "from common import *\ndef f(x, y):\n    z = x * y\n    return z.sqrt()\n"
    assert "z.clamp(min=" in rewritten(text, "z.sqrt", "form", "sqrt")


def test_a_loop_that_binds_again_after_the_line():
    text = body(
        "p = torch.softmax(x, -1)\nfor _ in range(3):\n    z = torch.log(p)\n    p = y\nreturn z"
    )
    assert rewritten(text, "torch.log(p)") == text


def test_an_epsilon_that_its_format_rounds_to_0():
    text = body("return torch.log(torch.softmax(x, -1) + 1e-8)")
    assert rewritten(text, "torch.log(", op="log", dtype="float32") == text
    after = rewritten(text, "torch.log(", op="log", dtype="float16")
    assert "return torch.log_softmax(x, -1)\n" in after


def test_modules_of_a_class():
    text = HEAD + (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.scale = 1, 2\n"
        "        self.soft = nn.Softmax(dim=1)\n"
        "        self.criterion = nn.BCELoss(reduction='sum')\n\n"
        "    def forward(self, x, y):\n"
        "        p = self.soft(x)\n"
        "        a = torch.log(p)\n"
        "        return self.criterion(torch.sigmoid(x), y)\n"
    )
    assert "a = F.log_softmax(x, dim=1)" in rewritten(text, "torch.log(p)")
    after = rewritten(text, "self.criterion(torch")
    assert "return F.binary_cross_entropy_with_logits(x, y, reduction='sum')" in after


@pytest.mark.parametrize("given", ["weight=weight", "weight"])
def test_a_module_that_weighs_classes_holds_their_weights(given):
    text = f"""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.loss = nn.CrossEntropyLoss({given})

    def forward(self, x, y):
        return self.loss(x, y)
"""
    assert rewritten(text, 11, "form", "nll_loss_forward").splitlines()[10].strip() == (
        'return nn.functional.cross_entropy(x, y, weight=self.loss.weight, reduction="sum") '
        "/ self.loss.weight[y[y != -100]].sum()"
        ".clamp(min=torch.finfo(self.loss.weight.dtype).tiny)"
    )


def test_nothing_else_of_the_file_changes():
    text = (
        "import torch\r\n\x0c\r\n# caf\u00e9 \u2028 \x0c\r\ndef f(x):\r\n"
        "\tname = 'caf\u00e9'; z = torch.log(torch.softmax(x,-1))  # \u00e9\r\n\treturn z"
    )
    after = rewritten(text, 5)
    assert after == text.replace("torch.log(torch.softmax(x,-1))", "torch.log_softmax(x, -1)")


def test_a_statement_over_several_lines():
    text = body("return (\n    y\n    * torch.log(\n        torch.softmax(x, -1)\n    )\n).sum()")
    for line in range(7, 13):
        assert "    * torch.log_softmax(x, -1)\n    ).sum()" in rewritten(text, line)


def test_a_quotient_that_stays_infinite_is_by_the_smallest_number():
    text = body("return torch.clamp(x / y, max=1.0).sum()")
    kept = rewritten(text, "return", "form", "div", value="kept")
    assert "torch.clamp(x / y.clamp(min=torch.finfo(y.dtype).tiny), max=1.0)" in kept


def test_a_quotient_that_is_infinite_is_left_out_and_one_of_zeros_is_divided_by_one():
    text = body("return (x / y).sum()")
    assert "x / y.masked_fill(y == 0, 1)" in rewritten(text, "return", "form", "div")
    left_out = rewritten(text, "return", "form", "div", inf=1)
    assert "torch.where(y == 0, 0, x / y.masked_fill(y == 0, 1))" in left_out
    value, grad = outcome(left_out, torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0]))
    assert (value.item(), grad.tolist()) == (2.0, [0.0, 0.5])


def test_a_number_of_python_that_is_0_has_no_methods_of_a_tensor():
    text = body("n = y.tolist()[0]\nreturn (x * y).sum() / n")
    changed = rewritten(text, "return", "form", "div", scalars=(0.0,))
    assert "return (x * y).sum() / (n or 1)" in changed
    value, _ = outcome(changed, torch.tensor([3.0]), torch.tensor([0.0]))
    assert value == 0.0


def test_only_a_whole_number_is_0_or_1_at_least():
    def last(n, **given):
        changed = rewritten(
            body(f"n = {n}\nreturn (x * y).sum() / n"), "/ n", "form", "div", **given
        )
        return changed.rstrip().rpartition(" / ")[2]

    share = (("data",), ("count", "data"))
    assert last("y.sum()", descent=share) == "n.masked_fill(n == 0, 1)"
    assert last("len(y)") == "max(n, 1)"
    assert last("y.sum().item()") == last("y.sum().item()", scalars=(0.0,)) == "(n or 1)"


WEIGHED = "labels, w = (y[:, 0] > 0).long(), torch.tensor([0.0, 2.0, 1.0])\n"
GUARDED = {
    ("return (x * y).sum() / y.sum()", "div"): (
        "return (x * y).sum() / divisor.masked_fill(divisor == 0, 1)"
    ),
    ("n = y.sum()\nreturn (x * y).sum() / n", "div"): (
        "return (x * y).sum() / n.masked_fill(n == 0, 1)"
    ),
    ("return 4 / math.pi**2 * torch.atan(x / y) - 2 / (3 * torch.pi)", "div"): (
        "return 4 / math.pi**2 * torch.atan(x / y.masked_fill(y == 0, 1)) - 2 / (3 * torch.pi)"
    ),
    ("return 2**0.5 * (x * y) ** 0.5", "pow"): "return 2**0.5 * (x * y).clamp(min=1.2e-38) ** 0.5",
    ("return x / x.norm(dim=-1, keepdim=True)", "div"): "return F.normalize(x, dim=-1)",
    ("return x / x.norm(p=2, dim=-1, keepdim=True)", "div"): "return F.normalize(x, dim=-1)",
    ("return F.normalize(x, eps=0.0, dim=-1)", "div"): "return F.normalize(x, eps=1e-12, dim=-1)",
    ("return (x * y).sum().div(y.sum())", "div"): (
        "return (x * y).sum().div(divisor.masked_fill(divisor == 0, 1))"
    ),
    ("return x / x.abs().sum(-1, keepdim=True)", "div"): (
        "return x / divisor.masked_fill(divisor == 0, 1)"
    ),
    ("return x / (x * y).sum(-1, keepdim=True).sqrt()", "div"): (
        "return x / (x * y).sum(-1, keepdim=True).clamp(min=1.2e-38).sqrt()"
    ),
    ("return torch.sqrt(x * y)", "sqrt"): "return torch.sqrt((x * y).clamp(min=1.2e-38))",
    ("return (x * y).sqrt()", "sqrt"): "return (x * y).clamp(min=1.2e-38).sqrt()",
    ("return torch.sqrt((x * y).clamp(min=0))", "sqrt"): (
        "return torch.sqrt((x * y).clamp(min=1.2e-38))"
    ),
    ("return (x * y).clamp_min(0.0).sqrt()", "sqrt"): "return (x * y).clamp(min=1.2e-38).sqrt()",
    ("return (x * y).clamp(0, 9).sqrt()", "sqrt"): (
        "return (x * y).clamp(0, 9).clamp(min=1.2e-38).sqrt()"
    ),
    ("return (x * y).clamp(max=9).sqrt()", "sqrt"): (
        "return (x * y).clamp(max=9).clamp(min=1.2e-38).sqrt()"
    ),
    ("return (x * y).clamp(min=1e-4).sqrt()", "sqrt"): (
        "return (x * y).clamp(min=1e-4).clamp(min=1.2e-38).sqrt()"
    ),
    ("return (x * y) ** 0.5", "pow"): "return (x * y).clamp(min=1.2e-38) ** 0.5",
    (
        "z = x * y\nreturn z.pow(0.5)",
        "pow",
    ): "return z.clamp(min=torch.finfo(z.dtype).tiny).pow(0.5)",
    ("p = x.mean()\nreturn y.pow(p).mean(1).pow(1 / p)", "pow"): (
        "return y.clamp(min=torch.finfo(y.dtype).tiny).pow(p).mean(1).clamp(min=1.2e-38).pow(1 / p)"
    ),
    ("return -torch.log(1 - torch.log(x * y))", "log"): (
        "return -torch.log((1 - torch.log((x * y).clamp(min=1.2e-38))).clamp(min=1.2e-38))"
    ),
    ("return y * torch.log(x * y)", "log"): "return y * torch.log((x * y).clamp(min=1.2e-38))",
    ("return x[y > 0].mean()", "mean"): "return chosen.sum() / max(chosen.numel(), 1)",
    ("return torch.nn.functional.mse_loss(x[y > 0], y[y > 0])", "mse_loss"): (
        "return torch.nn.functional.mse_loss"
        '(chosen, y[y > 0], reduction="sum") / max(chosen.numel(), 1)'
    ),
    ("return torch.stack([x[y[:, 0] > -c].mean(0) for c in range(3)])", "mean"): (
        "return torch.stack([x[y[:, 0] > -c].sum(0) / max(x[y[:, 0] > -c].shape[0], 1)"
        " for c in range(3)])"
    ),
    ("return x[y.sum(-1) > 0].mean(0)", "mean"): "return chosen.sum(0) / max(chosen.shape[0], 1)",
    ("return x[y.sum(-1) > 0].std()", "std"): (
        "return values.std(correction=min(1, values.numel() - 1))"
    ),
    ("return x.var(0, unbiased=True)", "var"): (
        "return x.var(dim=0, correction=min(1, x.shape[0] - 1))"
    ),
    ("return torch.std_mean(x, 1)[0]", "std_mean"): (
        "return torch.std_mean(x, dim=1, correction=min(1, x.shape[1] - 1))[0]"
    ),
    ("return torch.cov(x.T)", "div"): (
        "return torch.cov(x.T, correction=min(1, x.T.shape[-1] - 1))"
    ),
    ("return torch.special.entr(y).sum() * x", "entr"): (
        "return torch.special.entr(y.clamp(min=torch.finfo(y.dtype).tiny)).sum() * x"
    ),
    ("return torch.xlogy(y, y).sum() * x", "xlogy"): (
        "return torch.xlogy(y, y.clamp(min=torch.finfo(y.dtype).tiny)).sum() * x"
    ),
    ('return F.kl_div(x, 0.5 * y, reduction="sum")', "xlogy"): (
        'return F.kl_div(x, (0.5 * y).clamp(min=1.2e-38), reduction="sum")'
    ),
    ("return torch.acos(y)*x", "acos"): "return torch.acos(y.clamp(-1 + 1.2e-7, 1 - 1.2e-7))*x",
    ("return torch.acos(y.clamp(-1, 1)) * x", "acos"): (
        "return torch.acos(y.clamp(-1 + 1.2e-7, 1 - 1.2e-7)) * x"
    ),
    ("return torch.acos(y.clamp(0, 1)) * x", "acos"): (
        "return torch.acos(y.clamp(0, 1).clamp(-1 + 1.2e-7, 1 - 1.2e-7)) * x"
    ),
    ("return torch.atan2(x, y).cos()", "atan2"): (
        "return torch.atan2(x, y.masked_fill((x == 0) & (y == 0), 1)).cos()"
    ),
    ("return x.arctan2(x * y)", "atan2"): (
        "return x.arctan2(below.masked_fill((x == 0) & (below == 0), 1))"
    ),
    ("return x*(1 + y).acosh()", "acosh"): "return x*(1 + y).clamp(min=1 + 1.2e-7).acosh()",
    ("return torch.where(y > 0, torch.log(x * y), 0)", "log"): (
        "return torch.where(y > 0, torch.log(torch.where(y > 0, x * y, 1)), 0)"
    ),
    ("return torch.where(x < 9, torch.exp(x) - 1, y)", "exp"): (
        "return torch.where(x < 9, torch.exp(torch.where(x < 9, x, 0)) - 1, y)"
    ),
    ("return 1 / (1 + torch.exp(x * y))", "exp"): (
        "return 1 / (1 + torch.exp((x * y).clamp(max=88)))"
    ),
    ("return torch.where(y == 0, 0, x / y)", "div"): (
        "return torch.where(y == 0, 0, x / torch.where(y == 0, 1, y))"
    ),
    ('return F.softmax(x.masked_fill(y == 0, float("-inf")), -1)', "_softmax"): (
        "return F.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)"
    ),
    ("n = len(y[y > 0])\nreturn x.sum() / n", "div"): "return x.sum() / max(n, 1)",
    (
        "labels = torch.where(y[:, 0] > 0, 1, -100)\nreturn F.cross_entropy(x, labels)",
        "nll_loss_forward",
    ): ('return F.cross_entropy(x, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)'),
    (f"{WEIGHED}return F.cross_entropy(x, labels, weight=w)", "nll_loss_forward"): (
        'return F.cross_entropy(x, labels, weight=w, reduction="sum") '
        "/ w[labels[labels != -100]].sum().clamp(min=torch.finfo(w.dtype).tiny)"
    ),
    ("x = x * y\nreturn x ** 0.5 + torch.sqrt(x)", "sqrt"): (
        "return x.clamp(min=torch.finfo(x.dtype).tiny) ** 0.5 "
        "+ torch.sqrt(x.clamp(min=torch.finfo(x.dtype).tiny))"
    ),
}


@pytest.mark.parametrize(("before", "op"), GUARDED)
def test_guarded(before, op):
    text = body(before)
    after = rewritten(text, len(text.splitlines()), "form", op)
    assert after.splitlines()[-1].strip() == GUARDED[before, op]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.rand(2, 3, generator=generator) + 0.1
        y = torch.rand(2, 3, generator=generator) * 0.9 + 0.05
        for one, other in zip(outcome(text, x, y), outcome(after, x, y), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("before", "op"), GUARDED)
def test_guarded_has_values_where_there_were_none(before, op):
    after = rewritten(body(before), len(body(before).splitlines()), "form", op)
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    if "x.norm" in before or "x.abs" in before:
        x = torch.zeros(2, 3)
    if "std" in before:
        x, y = torch.ones(2, 1), torch.tensor([[1.0], [0.0]])
    if "var" in before or "cov" in before:
        x = torch.ones(1, 3)
    if "acos(" in before:
        y = torch.ones(2, 3)
    assert all(one.isfinite().all() for one in outcome(after, x, y))


OFF_ZERO = {
    "return torch.sin(x) / x": "return torch.sin(x_off_zero) / x_off_zero",
    "n = x.square()\nreturn y * torch.expm1(x) / (2 * x)": (
        "n = x.square()\n"
        "    x_off_zero = x.masked_fill(x == 0, 1e-6)\n"
        "    return y * torch.expm1(x_off_zero) / (2 * x_off_zero)"
    ),
    "return (1 - x.cos()) / x.square()": "return (1 - x_off_zero.cos()) / x_off_zero.square()",
}


@pytest.mark.parametrize("before", OFF_ZERO)
def test_off_zero(before):
    text = body(before)
    after = rewritten(text, len(text.splitlines()), "form", "div", value="off_zero")
    assert OFF_ZERO[before] in after
    assert "x_off_zero = x.masked_fill(x == 0, 1e-6)\n" in after


def test_a_layer_norm_without_eps_gets_the_usual_one():
    text = body("return F.layer_norm(x, (3,), eps=0.0) * y")
    after = rewritten(text, "return", "form", "native_layer_norm", value="guarded")
    assert "F.layer_norm(x, (3,), eps=1e-5) * y" in after


@pytest.mark.parametrize("kind", ["norm", "parameter"])
def test_a_size_within_a_lambda_is_kept_from_0_there(kind):
    text = body("scaled = lambda z: z / z.abs().amax(-1, keepdim=True)\nreturn scaled(x) + y")
    after = rewritten(text, "lambda", "form", "div", value="guarded", descent=((), (kind,)))
    typed = "scaled = lambda z: z / z.abs().amax(-1, keepdim=True).clamp(min=1e-12)\n"
    assert (typed in after) is (kind == "norm")


def test_a_mask_is_put_on_after_a_product():
    source = Source(body("return (x * y).softmax(-1)"))
    line = source.text.count("\n")
    read = (TensorStats(shape=(2,), dtype="float32"),)
    read += (TensorStats(shape=(2,), dtype="float32", neginf=1),)
    at = SourceLine(file="x.py", line=line, function="f")
    event = OpEvent(
        index=0, phase="forward", op="aten.mul.Tensor", module="", source=at, inputs=read
    )
    atom = Atom(remedy="form", target=f"x.py:{line}", value="mask_afterwards")
    after = edited(source.text, form_edits(source, line, atom, event))
    assert (
        'return ((x * y.masked_fill(y == float("-inf"), 0.0))'
        '.masked_fill(y == float("-inf"), float("-inf"))).softmax(-1)'
    ) in after


def test_a_number_beyond_half_is_mended_where_it_is_written():
    text = body("least = torch.tensor(-1e9, dtype=x.dtype)\nreturn (1 - y) * least + x")
    after = rewritten(text, "return", "finite_fill", "mul", dtype="float16", value="1e4")
    assert "least = torch.tensor(-1e4, dtype=x.dtype)\n" in after
    assert rewritten(text, "return", "finite_fill", "mul", value="1e4") == text


def test_off_zero_in_all_that_reads_it_afterwards():
    text = body("z = y / x\nw = x * z.tanh()\nreturn w + x")
    after = rewritten(text, "y / x", "form", "div", value="off_zero")
    assert after.endswith(
        "z = y / x_off_zero\n    w = x_off_zero * z.tanh()\n    return w + x_off_zero\n"
    )


@pytest.mark.parametrize("lines", ["z = y / x\nx = z + 1\nreturn x", "return y / (x + x.abs())"])
def test_off_zero_is_not_known_of_a_name_that_changes_or_of_two(lines):
    text = body(lines)
    assert rewritten(text, "y /", "form", "div", value="off_zero") == text


def test_a_count_becomes_at_least_1():
    text = body("n = (y > 0).sum()\nreturn (x * y).sum() / n")
    descent = (("data",), ("count", "data", "whole"))
    after = rewritten(text, "/ n", "form", "div", descent=descent)
    assert "return (x * y).sum() / n.clamp(min=1)\n" in after


def test_ctc():
    call = "return F.ctc_loss(x.log_softmax(-1), y, n, m)"
    assert "n, m, zero_infinity=True)" in rewritten(body(call), "ctc", "form", "_ctc_loss")
    made = HEAD + "loss = nn.CTCLoss(blank=0)\ndef f(x, y):\n    return loss(x, y, n, m)\n"
    after = rewritten(made, "return", "form", "_ctc_loss")
    assert "nn.CTCLoss(blank=0, zero_infinity=True)" in after


NOT_HOISTED = [
    "return torch.rand(3) + x / (x * torch.rand(3)).sum()",
    "return [x / (x * one).sum() for one in y][0]",
    "return x if y is None else x / (x * y).sum()",
    "return (lambda z: z / (z * 2).sum())(x)",
]


@pytest.mark.parametrize("before", NOT_HOISTED)
def test_a_line_before_the_statement_must_not_change_its_order(before):
    assert rewritten(body(before), "return", "form", "div") == body(before)


def test_what_a_library_computes_in_a_line_is_nothing_to_rewrite_there():
    text = body("return -x.log_prob(y).mean()")
    assert rewritten(text, "log_prob", "form", "atanh") == text
    assert rewritten(text, "log_prob", "form", "mean") != text


MASKED = {
    ("return x / x.norm(dim=-1, keepdim=True)", "div"): (
        "return x / divisor.masked_fill(divisor == 0, 1)"
    ),
    (
        "return x.pow(-0.5)",
        "pow",
    ): "return x.masked_fill(x <= 0, 1).pow(-0.5).masked_fill(x <= 0, 0)",
    ("return x.rsqrt() * y", "rsqrt"): (
        "return x.masked_fill(x <= 0, 1).rsqrt().masked_fill(x <= 0, 0) * y"
    ),
    ("return x ** -0.5 * y", "pow"): (
        "return (x.masked_fill(x <= 0, 1) ** -0.5).masked_fill(x <= 0, 0) * y"
    ),
}


@pytest.mark.parametrize(("before", "op"), MASKED)
def test_what_a_shorter_code_gives_another_value_is_left_out_by_a_mask(before, op):
    changed = rewritten(body(before), "return", "form", op, value="masked")
    assert MASKED[before, op] in changed
    value, grad = outcome(changed, torch.tensor([0.0, 4.0]), torch.tensor([1.0, 2.0]))
    assert value.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("line", ["x.pow(-0.5)", "x.rsqrt()"])
def test_a_count_is_kept_at_1_whatever_divides_by_it(line):
    text = body(f"return {line}")
    op = "pow" if "pow" in line else "rsqrt"
    counted = rewritten(
        text,
        "return",
        form="form",
        op=op,
        descent=(("count", "whole"),),
        scalars=(-0.5,) if op == "pow" else (),
    )
    assert f"return {line.replace('x.', 'x.clamp(min=1).')}" in counted


IN_FLOAT32 = {
    ("pow", "return x.pow(2).sum()"): "return x.float().pow(2).sum()",
    ("pow", "return (x + y) ** 2"): "return (x + y).float() ** 2",
    ("mul", "return (x * y).sum(-1)"): "return (x.float() * y).sum(-1)",
    ("mul", "return 2 * x / y"): "return 2 * x.float() / y",
    ("mul", "return x * y * y"): "return x.float() * y * y",
    ("sum", "return torch.sum(x)"): "return torch.sum(x.float())",
    ("matmul", "return torch.matmul(x, y.T)"): "return torch.matmul(x.float(), y.T.float())",
    ("exp", "return (x - y).exp()"): "return (x - y).float().exp()",
    ("exp", "return x * y"): "return x * y",
}


@pytest.mark.parametrize(("old", "new"), IN_FLOAT32.items())
def test_the_failing_operation_of_a_line_in_float32(old, new):
    op, line = old
    text = rewritten(body(line), line, form="fp32_line", op=op, dtype="float16")
    assert text == body(new)
    x, y = torch.rand(3, 4).half() + 0.5, torch.rand(3, 4).half() + 0.5
    (was, _), (now, _) = outcome(body(line), x, y), outcome(text, x, y)
    assert now.dtype is (torch.float16 if new == line else torch.float32)
    torch.testing.assert_close(now, was.float() if new != line else was, rtol=1e-2, atol=1e-2)


TAUGHT = body("q = torch.softmax(x, -1)\nreturn (y * (y.log() - q.log())).sum()")


def test_of_two_divisions_each_may_be_the_one():
    line = "return 1 - 0.5 * (x / y).sum() / y.sum()"
    guard = Atom(remedy="form", target="x.py:7", value="guarded")
    proof = Proof(incident="0000", verdict="proven", minimal=(guard,))
    codes = [code.files[0].after for code in codes_of(proof, None, {"x.py": body(line)}.get)]
    assert len(codes) == 2
    assert "(x / y).sum() / divisor.masked_fill(" in codes[0]
    assert "(x / y.masked_fill(y == 0, 1)).sum() / y.sum()" in codes[1]


def test_what_is_computed_in_log_space_is_not_guarded_as_well():
    guard = Atom(remedy="form", target="x.py:8", value="guarded:log")
    stable = Atom(remedy="stable_form", target="x.py:8", value="log_space")
    proof = Proof(incident="0000", verdict="proven", minimal=(guard, stable))
    (code,) = codes_of(proof, None, {"x.py": TAUGHT}.get)
    (change,) = code.files
    assert set(code.atoms) == {guard, stable}
    assert "y.clamp(min=torch.finfo(y.dtype).tiny).log() - torch.log_softmax(x, -1)" in change.after
    x, y = torch.tensor([[300.0, -300.0, 0.0]]), torch.tensor([[0.0, 0.5, 0.5]])
    assert not outcome(TAUGHT, x, y)[0].isfinite()
    assert all(one.isfinite().all() for one in outcome(change.after, x, y))


UNWRITTEN = {
    "z = torch.empty(3, 4)": "z = torch.zeros(3, 4)",
    "z = torch.empty_like(x)": "z = torch.zeros_like(x)",
    "z = x.new_empty(3, device=x.device)": "z = x.new_zeros(3, device=x.device)",
    "z = torch.empty_strided((2,), (1,))": "z = torch.empty_strided((2,), (1,)).zero_()",
    "z = F.silu(F.grouped_mm(x, y, offs=ends))": (
        "num_written = int(ends[-1])\n"
        "z = F.silu(F.pad(F.grouped_mm(x[:num_written], y, offs=ends), "
        "(0, 0, 0, len(x) - num_written)))"
    ),
    "z = torch._grouped_mm(x.half(), y, ends)": (
        "rows = x.half()\n"
        "num_written = int(ends[-1])\n"
        "z = F.pad(torch._grouped_mm(rows[:num_written], y, ends), "
        "(0, 0, 0, len(rows) - num_written))"
    ),
}


@pytest.mark.parametrize("before", UNWRITTEN)
def test_memory_that_is_not_written_is_zeros(before):
    text = body(f"{before}\nreturn z")
    found = rewritten(text, before, "memory_fill", "empty", value="0")
    assert found == body(f"{UNWRITTEN[before]}\nreturn z")


def test_memory_by_another_name():
    text = "from torch import empty\nimport torch\n\nz = empty(3)\n"
    assert "z = torch.zeros(3)" in rewritten(text, "z =", "memory_fill", "empty", value="0")


def test_a_product_whose_groups_have_no_ends_is_left_alone():
    text = body("return F.grouped_mm(x, y)")
    assert rewritten(text, "grouped", "memory_fill", "_grouped_mm", value="0") == text


def test_every_operation_of_a_line_is_guarded_where_asked_for():
    text = body("return 0.5 * (x.log() + (x - y) ** 2 / x).mean()")
    assert (
        "(x.clamp(min=torch.finfo(x.dtype).tiny).log() + "
        "torch.where(x == 0, 0, (x - y) ** 2 / x.masked_fill(x == 0, 1))).mean()"
    ) in rewritten(text, "return", "form", "log", inf=1, value="every")


def test_how_many_numbers_a_mean_is_of_without_the_module_for_their_logarithm():
    text = "import torch\n\n\ndef f(x, y):\n    return (x * y).exp().mean(1).log().sum()\n"
    after = rewritten(text, 5)
    assert "torch.tensor(float(logs.shape[1])).log()" in after
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for one, other in zip(outcome(text, x, y), outcome(after, x, y), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("read", "dtype", "least"),
    [
        ({"absmin_nonzero": 0.3, "zeros": 1}, "float32", "1e-12"),
        ({"zeros": 2}, "float32", "1e-12"),
        ({"absmin_nonzero": 1e-20, "zeros": 1}, "float32", "1.2e-38"),
        ({}, "float32", "1.2e-38"),
        ({"absmin_nonzero": 0.3, "zeros": 1}, "float16", "6.1e-5"),
    ],
)
def test_a_root_is_kept_off_0_by_a_usual_number_where_nothing_is_smaller(read, dtype, least):
    text = body("return torch.sqrt(x * y)")
    changed = rewritten(text, "return", "form", "sqrt", dtype, value="guarded", read=read)
    assert f"return torch.sqrt((x * y).clamp(min={least}))" in changed


def test_a_bound_is_typed_in_each_statement_of_a_line():
    text = HEAD + "def f(k, u):\n    a = torch.exp(k); b = torch.exp(u + k)\n    return a + b\n"
    after = rewritten(text, "a = torch", "form", op="exp", value="bounded")
    assert "a = torch.exp(k.clamp(max=20)); b = torch.exp((u + k).clamp(max=20))" in after


CARRIED = (
    "def f(e, t):\n"
    "    alpha = torch.exp(e[0])\n"
    "    for i in range(1, len(e)):\n"
    "        alpha = (alpha @ torch.exp(t)) * torch.exp(e[i])\n"
    "        {more}\n"
    "    return torch.log(alpha.sum())\n"
)


def test_a_logarithm_is_carried_through_a_function():
    text = HEAD + CARRIED.format(more="alpha /= 2.0")
    after = rewritten(text, "alpha @", value="carried_matrices")
    assert "    log_alpha = e[0]\n" in after
    assert "        log_alpha = torch.logsumexp(log_alpha.unsqueeze(-1) + t, -2) + e[i]\n" in after
    assert "    return torch.logsumexp(log_alpha.flatten(), 0)\n" in after
    torch.manual_seed(0)
    e, t = torch.randn(5, 3), torch.randn(3, 3)
    old, new = {}, {}
    exec(text, old)
    exec(after, new)
    torch.testing.assert_close(old["f"](e, t), new["f"](e, t))


@pytest.mark.parametrize("more", ["alpha -= 1.0", "alpha, _ = alpha, i", "h = lambda: alpha"])
def test_what_may_be_negative_or_is_bound_otherwise_is_not_carried(more):
    text = HEAD + CARRIED.format(more=more)
    assert rewritten(text, "alpha @", value="carried_matrices") == text
