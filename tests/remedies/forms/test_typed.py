"""What can be typed for a form is run in the place of the line: the values are those of the new
file's function.
"""

import pytest
import torch
from torch import nn

from nanstop.records import Atom, OpEvent, SourceLine, TensorStats
from nanstop.remedies.forms.typed import typed
from nanstop.rewrite.files import FileChange
from nanstop.rewrite.forms.form_code import form_edits
from nanstop.rewrite.source import Source, edited
from versions import needs_columns

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

ctc = nn.CTCLoss(blank=0)
soft = nn.Softmax(dim=1)
net = nn.Sequential(nn.Identity())
log = torch.distributions.transforms.ExpTransform().inv
powers = torch.tensor(-1.0)


def inner(x):
    return torch.log(x)


def f(x, y):
"""
COUNT = torch.tensor([[2.0], [0.0]])
X = torch.tensor([[0.5, -1.0, 2.0], [0.1, 3.0, -0.5]])

CASES = {
    "quotient": ("return x / y", "form", "div", {"inf": 1}),
    "dear divisor": ("return x.exp() / (y * y)", "form", "div", {"inf": 1}),
    "noise": ("return -torch.log(-torch.log(x.sigmoid() * y))", "form", "log", {}),
    "root": ("z = x * y\n    return z.square().sum(-1).sqrt()", "form", "sqrt", {}),
    "by keyword": ("return F.softmax(input=x * y.log(), dim=-1)", "form", "_softmax", {}),
    "as a module": ("return soft(x * y.log())", "form", "_softmax", {}),
    "again and again": (
        "for n in range(3):\n        x = x / (y + n - 1)\n    return x",
        "form",
        "div",
        {"inf": 1},
    ),
    "of a model": ("return (net(x) * y).square().sum(-1).sqrt()", "form", "sqrt", {}),
    "chosen": ("return torch.where(y > 0, x, 0) / y", "form", "div", {"inf": 1}),
    "a function of its own": ("return inner(x * y) + torch.log(x * y)", "form", "log", {}),
    "random": ("return torch.log(F.dropout(x.exp() * y, 0.5))", "form", "log", {}),
    "a lambda": ("return (lambda p: torch.log(p) * torch.log(p + 2))(x * y)", "form", "log", {}),
    "a comprehension": (
        "return sum((y - 1).exp() / (y - 1) + a / n for a, n in zip(x, y))",
        "form",
        "div",
        {"inf": 1},
    ),
    "shadowed": (
        "return (x / y) + torch.stack([x / y[i] for i, x in enumerate(x.exp())]) + x / y",
        "form",
        "div",
        {"inf": 1},
    ),
    "a branch": ("return torch.log(x * y) if y.dim() > 1 else x", "form", "log", {}),
    "power of a power": ("return (x * y).square() ** x.exp() ** powers", "form", "pow", {}),
    "beside a model's own": ("return log(x * y) + torch.log(x * y)", "form", "log", {}),
    "several lines": (
        "return (\n        (x * y)\n        .square()\n        .sum(-1)\n        .sqrt()\n    )",
        "form",
        "sqrt",
        {},
    ),
    "of two lines": (
        "z = x * 200\n    p = torch.sigmoid(z)\n    q = 1 - p\n    return torch.log(q)",
        "stable_form",
        "log",
        {},
    ),
    "picked": (
        "p = (x * 200).softmax(-1)\n    return -torch.log(p[[0, 1], y[:, 0].long()]).mean()",
        "stable_form",
        "log",
        {},
    ),
    "of another method": (
        "z = (x * y).square()\n    return torch.where(y > 0, z.sqrt(), x.amax(-1, True))",
        "form",
        "sqrt",
        {},
    ),
    "a number times what is new": (
        "z = x * 200\n    n = 2.5\n    return -n * torch.log(torch.exp(z).sum())",
        "stable_form",
        "log",
        {},
    ),
    "beside others in its line": (
        "z = x * y; e = torch.log(z) + x / y; return e.exp() + x",
        "form",
        "div",
        {"inf": 1},
    ),
    "share": (
        "e = torch.exp(x * 200)\n    return e / e.sum(-1, keepdim=True)",
        "stable_form",
        "div",
        {},
    ),
}


def change(tmp_path, body, form, op, given):
    text = HEAD + f"    {body}\n"
    line = len(text.splitlines())
    stats = TensorStats(shape=(2,), dtype="float32")
    place = SourceLine(file=str(tmp_path / "x.py"), line=line, function="f")
    event = OpEvent(
        index=0,
        phase="forward",
        op=f"aten.{op}.Tensor",
        module="",
        source=place,
        inputs=(stats, stats),
        outputs=(TensorStats(shape=(2,), dtype="float32", posinf=given.get("inf", 0)),),
    )
    if "for n" in body:
        line -= 1
    source = Source(text)
    atom = Atom(remedy=form, target=f"{place.file}:{line}")
    return FileChange(place.file, text, edited(text, form_edits(source, line, atom, event)))


def function(file, text):
    space = {"__name__": "x"}
    exec(compile(text, file, "exec"), space)
    return space["f"]


def outcome(compute):
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    result = compute(x, COUNT)
    result.sum().backward()
    return result.detach(), x.grad


@needs_columns
@pytest.mark.parametrize("name", CASES)
def test_the_line_computes_what_the_changed_file_does(tmp_path, name):
    made = change(tmp_path, *CASES[name])
    assert made.after != made.before
    with typed([made]) as (found,):
        run = outcome(function(made.file, made.before))
    assert found.is_run
    expected = outcome(function(made.file, made.after))
    for one, other in zip(run, expected, strict=True):
        assert torch.equal(one.nan_to_num(9e9), other.nan_to_num(9e9))
    before = outcome(function(made.file, made.before))
    assert not all(map(torch.equal, run, before))


@pytest.mark.parametrize(
    ("name", "is_run"),
    [("dear divisor", True), ("again and again", True), ("share", True), ("a lambda", False)],
)
def test_python_does_not_say_before_311_where_in_a_line_it_is(tmp_path, monkeypatch, name, is_run):
    monkeypatch.setattr("nanstop.remedies.forms.typed.span_at", lambda *_: None)
    made = change(tmp_path, *CASES[name])
    with typed([made]) as (found,):
        outcome(function(made.file, made.before))
    assert found.is_run == is_run


@needs_columns
def test_what_the_call_before_compared_is_not_what_this_one_does():
    text = HEAD + "    return torch.where(x <= 0.5, x, 2 * x ** 0.5)\n"
    made = FileChange("x.py", text, text.replace("x ** 0.5", "torch.where(x <= 0.5, 1, x) ** 0.5"))
    with typed([made]) as (found,):
        compute = function("x.py", text)
        runs = [compute(x, COUNT) for x in (X.abs(), -X.abs(), X.abs() + 0.4)]
    assert found.is_run
    compute = function("x.py", made.after)
    wanted = [compute(x, COUNT) for x in (X.abs(), -X.abs(), X.abs() + 0.4)]
    assert all(map(torch.equal, runs, wanted))


def test_a_constructor_with_another_argument_is_made_anew(tmp_path):
    scores, texts = torch.randn(4, 2, 5).log_softmax(-1), torch.tensor([[1, 1, 1], [1, 2, 3]])
    lengths, sizes = torch.tensor([4, 4]), torch.tensor([3, 3])
    text = HEAD + "    return ctc(x, *y)\n"
    text = text.replace("*y", "y[0], y[1], y[2]")
    made = FileChange("x.py", text, text.replace("blank=0", "blank=0, zero_infinity=True"))
    with typed([made]) as (found,):
        run = function("x.py", text)(scores, (texts, lengths, sizes))
    assert found.is_run
    assert run.isfinite()
    assert function("x.py", text)(scores, (texts, lengths, sizes)) == torch.inf


def test_what_no_operation_was_given_is_not_made_up(tmp_path):
    text = HEAD + "    big = y > 0\n    return torch.log(x)\n"
    made = FileChange("x.py", text, text.replace("log(x)", "log(torch.where(big, x, 1))"))
    with typed([made]) as (found,):
        run = function("x.py", text)(X, COUNT)
    assert not found.is_run
    assert torch.equal(run.nan_to_num(), torch.log(X).nan_to_num())


@pytest.mark.parametrize(
    "after", ["return torch.log(x) + 1", "y = x\n    return torch.log(x)", "return x"]
)
def test_a_file_that_differs_in_more_is_not_run(after):
    text = HEAD + "    return torch.log(x)\n"
    with typed([FileChange("x.py", text, text.replace("return torch.log(x)\n", after))]) as (one,):
        function("x.py", text)(X, COUNT)
    assert not one.is_run


@needs_columns
def test_a_quotient_of_numbers_that_is_replaced_speaks_against_what_is_typed():
    text = HEAD + "    n = len(x)\n    return 4 / n * torch.log(x + 1)\n"
    by_one = text.replace("/ n", "/ n.masked_fill(n == 0, 1)")
    above_0 = text.replace("x + 1", "(x + 1).clamp(min=1)")
    both = by_one.replace("x + 1", "(x + 1).clamp(min=1)")
    for after, is_refuted in ((by_one, False), (above_0, False), (both, True)):
        with typed([FileChange("x.py", text, after)]) as (one,):
            function("x.py", text)(X, COUNT)
        assert one.is_refuted == is_refuted
        assert one.is_run == (after == above_0)


def test_a_line_that_is_never_run_is_not_run():
    text = HEAD + "    return torch.log(x)\n"
    with typed([FileChange("x.py", text, text.replace("log(x)", "log(x.abs())"))]) as (one,):
        nn.Linear(2, 2)
    assert not one.is_run
