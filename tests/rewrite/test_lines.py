"""Forms whose change belongs to another line than the one that failed."""

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
