"""Forms whose change belongs to another line than the one that failed."""

import pytest

from nanstop.records import Atom
from nanstop.rewrite.forms.form_code import form_edits
from nanstop.rewrite.source import Source, edited

BODY = """
import torch


def loss(x):
    above = torch.exp(x)
    below = torch.exp(x + 1).sum(dim=-1, keepdim=True)
    other = x.mean()
    print(other)
    return -torch.log(above / below)
"""


def rewritten(line, remedy="stable_form", value="log_space"):
    atom = Atom(remedy=remedy, target=f"train.py:{line}", value=value)
    return edited(BODY, form_edits(Source(BODY), line, atom, None))


def test_an_exponential_is_made_stable_where_its_logarithm_is_taken():
    text = rewritten(6)
    assert "    above = torch.exp(x)\n" in text
    assert "return -(x - torch.logsumexp(" in text


def test_a_line_that_nothing_reads_stays():
    assert rewritten(8) == BODY


def test_every_operation_of_a_line_is_guarded_where_none_is_named():
    text = BODY.replace("x.mean()", "torch.sqrt(x.sum())")
    atom = Atom(remedy="form", target="train.py:8", value="guarded")
    changed = edited(text, form_edits(Source(text), 8, atom, None))
    assert "torch.sqrt(x.sum().clamp(min=1.2e-38))" in changed


def out_of_autocast(text, line):
    atom = Atom(remedy="fp32_line", target=f"train.py:{line}", value="out_of_autocast:mm")
    return edited(text, form_edits(Source(text), line, atom, None, "cuda"))


def test_a_block_without_autocast_holds_the_whole_statement():
    before = "import torch\n\ndef f(a, b):\n    return (\n        a @ b\n    ).sum()  # of all\n"
    after = (
        "import torch\n\ndef f(a, b):\n"
        '    with torch.autocast("cuda", enabled=False):\n'
        "        return (\n            a.float() @ b.float()\n        ).sum()  # of all\n"
    )
    assert out_of_autocast(before, 5) == after


def test_what_can_have_no_block_stays():
    for line in (
        'x = f(a @ b, """two\nlines""")',
        "y = 1; x = a @ b",
        "while (a @ b).sum() > 0:\n    pass",
    ):
        text = f"import torch\n{line}\n"
        assert out_of_autocast(text, 2) == text


@pytest.mark.parametrize(
    ("value", "old", "new"),
    [
        ("uncast", "x = (a + b).half() * c.to(torch.float16)", "x = (a + b).float() * c.float()"),
        ("uncast", "x = a.half().float()", "x = a.float()"),
        ("uncast", "x = a.to(b.dtype).sum()", "x = a.float().sum()"),
        ("uncast", "x = a.to(device)", "x = a.to(device)"),
        ("uncast", "x = a.to(torch.float32)", "x = a.to(torch.float32)"),
        ("each_read", "x = (a - a.mean()) / 2", "x = (a.float() - a.float().mean()) / 2"),
        ("each_read", "x = torch.log(self.p + 1)", "x = torch.log(self.p.float() + 1)"),
        (
            "and_back:pow",
            "return a * torch.rsqrt(b.pow(2).mean(-1) + 1e-8)",
            "return (a * torch.rsqrt(b.float().pow(2).mean(-1) + 1e-8)).to(b.dtype)",
        ),
        (
            "each_and_back",
            "x = torch.rsqrt(b.pow(2).mean(-1) + self.eps)",
            "x = torch.rsqrt(b.float().pow(2).mean(-1) + self.eps).to(b.dtype)",
        ),
        ("and_back:pow", "assert (a.pow(2) > b).all()", "assert (a.pow(2) > b).all()"),
        (
            "out_of_autocast:uncast",
            "x = a.half() @ b.half().T",
            'with torch.autocast("cuda", enabled=False):\n    x = a.float() @ b.float().T',
        ),
    ],
)
def test_ways_to_type_a_line_in_float32(value, old, new):
    text = (
        "import torch\ndef f(self, a, b, c, device):\n    {}\n"
        "def __init__(self, eps=1e-8):\n    self.eps = eps\n"
    )
    atom = Atom(remedy="fp32_line", target="train.py:3", value=value)
    before = text.format(old)
    changed = edited(before, form_edits(Source(before), 3, atom, None, "cuda"))
    assert changed == text.format(new.replace("\n", "\n    "))
