"""What a script says in place of a library's line."""

from nanstop.rewrite.override import override

LIBRARY = """\
import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6


class Norm(nn.Module):
    def forward(self, x):
        length = x.norm()
        return x / (length + EPS)


def helper(x):
    return torch.log(torch.softmax(x, -1))
"""


def test_a_method():
    after = LIBRARY.replace("x / (length", "F.relu(x) / (length")
    assert override(LIBRARY, after, "lib.norms") == (
        "import torch.nn.functional as F\nfrom lib.norms import EPS, Norm\n\n"
        "def forward(self, x):\n    length = x.norm()\n    return F.relu(x) / (length + EPS)\n\n"
        "Norm.forward = forward"
    )


def test_a_function():
    after = LIBRARY.replace("torch.log(torch.softmax(x, -1))", "torch.log_softmax(x, -1)")
    code = override(LIBRARY, after, "lib.norms")
    assert code.startswith("import torch\nimport lib.norms\n\ndef helper(x):")
    assert code.endswith("lib.norms.helper = helper")


def test_none_where_it_could_not_stand_elsewhere():
    text = LIBRARY.replace("x.norm()", "super().forward(x)")
    assert override(text, text.replace("+ EPS", "+ 1"), "lib") is None
    assert override(LIBRARY, LIBRARY.replace("EPS = 1e-6", "EPS = 1"), "lib") is None


def test_what_a_library_imports_from_itself_or_not_always_is_taken_from_it():
    library = "from . import ops\ntry:\n    import fast\nexcept ImportError:\n    fast = None\n\n\n"
    library += "def f(x):\n    return ops.log(fast, x)\n"
    code = override(library, library.replace("ops.log(", "ops.log1p("), "lib")
    assert code.startswith("from lib import fast, ops\nimport lib\n")
