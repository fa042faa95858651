"""Scripts spelled anew: a rewrite keeps what a script computes; answers are compared rightly."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "cases")]  # after the tests: both have a `tiny`

from truth import Truth  # noqa: E402
from variants.answer import Answer, changes  # noqa: E402
from variants.catalogue import FAMILIES, variants_of  # noqa: E402
from variants.operands import noted, noting  # noqa: E402
from variants.operations import same_operation  # noqa: E402
from variants.plain import Plain, difference  # noqa: E402
from variants.script import Rewrite, Script, Variant, variant_of  # noqa: E402

LOOP = '''
"""A loop of its own."""

import torch
from torch import nn
from torch.nn import functional as F

PAD = 0


class Out:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens_of = nn.Embedding(12, width)
        self.head = nn.Linear(width, 12)

    def forward(self, input_ids, labels=None):
        hidden = self.tokens_of(input_ids)
        spread = hidden.square().mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(spread + 1e-6)
        weights = (hidden @ hidden.transpose(1, 2)).softmax(-1)
        hidden = hidden + torch.matmul(weights, hidden) / hidden.shape[-1] ** 0.5
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Out(loss, logits)


def build(hidden_size=8):
    torch.manual_seed(0)
    return Net(hidden_size)


def batches(num, rows=3):
    """Return batches whose entries ``weighing`` only the script reads."""
    made = []
    for number in range(num):
        ids = (torch.arange(5) + torch.arange(rows)[:, None] + number) % 12
        made.append({"input_ids": ids, "labels": ids})
    return made


def extra(logits, ids):
    """Return a loss that says the same things in many words."""
    held = {"weighing": torch.ones(ids.shape[0])}
    logp = F.log_softmax(logits, -1)
    picked = logp.gather(-1, ids[..., None])[..., 0].masked_fill(ids == PAD, 0.0)
    each = (picked**2).mean(-1) * held["weighing"] / held["weighing"].sum()
    root = torch.sqrt(each.sum() + each.mean() + 1.0)
    ignored = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=PAD)
    return root + ignored - F.logsigmoid(logits).mean()


def train(*, rate):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    sizes = [one["input_ids"].numel() for one in batches(2)]
    for batch in batches(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")
    for number in range(2):
        ids = batches(1)[0]["input_ids"]
        loss = extra(model(ids).logits, ids) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f} of {sum(sizes)}")


if __name__ == "__main__":
    train(rate=0.05)
'''.lstrip()

TRAINER = """
import torch

ORDER = "sequential"


class Trainer:
    def __init__(self, model, train_dataset, callbacks=()):
        self.model, self.rows = model, train_dataset

    def compute_loss(self, model, rows):
        return model(torch.stack(rows)).square().mean()

    def train(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for first in range(0, len(self.rows), 2):
            loss = self.compute_loss(self.model, [self.rows[first + one] for one in range(2)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{loss.item():.5f}")


def train():
    torch.manual_seed(0)
    rows = [torch.randn(3) for _ in range(8)]
    Trainer(torch.nn.Linear(3, 1), train_dataset=rows).train()


if __name__ == "__main__":
    train()
""".lstrip()

REWRITES = [one for family in FAMILIES.values() for one in family]


def printed(source: str) -> list[float]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, "case.py", "exec"), {"__name__": "__main__"})
    words = out.getvalue().replace("loss", "").replace("of", "").split()
    return [float(word) for word in words]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[Script]:
    """The scripts above, with what their operands were as they ran."""
    made = []
    for source in (LOOP, TRAINER):
        folder = tmp_path_factory.mktemp("noted")
        watching = noting(source)
        if watching is not None:
            with contextlib.chdir(folder) if sys.version_info >= (3, 11) else _within(folder):
                printed(watching)
        made.append(Script(source, noted(folder)))
    return made


@contextlib.contextmanager
def _within(folder: Path) -> Any:
    import os

    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("rewrite", REWRITES, ids=[one.name for one in REWRITES])
def test_a_rewrite_changes_the_script_and_not_its_losses(
    rewrite: Rewrite, scripts: list[Script]
) -> None:
    made = [(script, variant_of(script, rewrite)) for script in scripts]
    applied = [(script, variant) for script, variant in made if variant is not None]
    assert applied, "the rewrite changes neither script"
    for script, variant in applied:
        if rewrite.name != "respelled":
            assert ast.dump(ast.parse(variant.source)) != ast.dump(script.tree())
        tolerance = 2e-3 if rewrite.keeps_numbers else 10.0
        assert printed(variant.source) == pytest.approx(printed(script.source), abs=tolerance)


def test_rewrites_have_names_of_their_own() -> None:
    assert len({one.name for one in REWRITES}) == len(REWRITES)


def test_a_line_is_followed_through_every_rewrite(scripts: list[Script]) -> None:
    """The optimizer is made on one line of the script, and in every variant of it that keeps it."""
    (line,) = [
        number
        for number, text in enumerate(LOOP.splitlines(), 1)
        if text.startswith("    optimizer =")
    ]
    for variant in variants_of(scripts[0]):
        lines = variant.source.splitlines()
        (new,) = [number for number, text in enumerate(lines, 1) if ".SGD(" in text]
        assert line in variant.lines[new], variant.rewrite.name


def test_only_operands_that_were_tensors_are_spelled_otherwise(scripts: list[Script]) -> None:
    by_name = {one.rewrite.name: one.source for one in variants_of(scripts[0])}
    assert ".sum().reciprocal()" in by_name["quotient-by-reciprocal"]
    assert "hidden.shape[-1] ** 0.5" in by_name["roots-as-powers"]  # the root of a number stays
    assert "loss = extra(model(ids).logits, ids) * (1 / 2)" in by_name["quotient-by-a-number"]


def test_one_operation_has_several_spellings() -> None:
    assert same_operation("aten.div.Tensor", "aten.reciprocal.default")
    assert same_operation("aten.mul.Tensor", "aten.mul_.Tensor")
    assert same_operation("aten.nll_loss_forward.default", "aten.nll_loss*")
    assert not same_operation("aten.mul.Tensor", "aten.mm.default")
    assert not same_operation("", "aten.mm.default")


# ---- comparison

SAID = Answer(
    answers=(("NS205", "certain"),),
    op="aten.div.Tensor",
    module="layers.1",
    step=3,
    micro=0,
    samples=(1,),
    num_rows=4,
    line=("case.py", 12),
)


def made_by(rewrite: Rewrite, **more: Any) -> Variant:
    return Variant(rewrite, "", {20: frozenset((12, 13))}, more.get("renamed", {}))


def keep(script: Script) -> ast.Module:
    return script.tree()


def test_the_same_answer_of_a_variant_has_no_changes() -> None:
    plain = made_by(Rewrite("plain", keep))
    assert changes(SAID, replace(SAID, line=("case.py", 20)), plain) == []
    wrapped = made_by(Rewrite("wrapped", keep, added="held"))
    held = replace(SAID, line=("case.py", 20), module="held.layers.1")
    assert changes(SAID, held, wrapped) == []
    renamed = made_by(Rewrite("renamed", keep), renamed={"a0": "layers"})
    assert changes(SAID, replace(SAID, line=("case.py", 20), module="a0.1"), renamed) == []
    torch_module = made_by(Rewrite("as a module", keep, modules=("MSELoss",)))
    of_script = replace(SAID, module="", line=("case.py", 20))
    assert (
        changes(replace(SAID, module=""), replace(of_script, module="MSELoss"), torch_module) == []
    )
    other_width = made_by(Rewrite("other width", keep, keeps_numbers=False))
    assert changes(SAID, replace(SAID, line=("case.py", 20), samples=(0, 3)), other_width) == []
    reciprocal = replace(SAID, line=("case.py", 20), op="aten.reciprocal.default")
    assert changes(SAID, reciprocal, plain) == []


def test_the_row_follows_the_rows() -> None:
    turned = made_by(Rewrite("turned", keep, rows="reversed"))
    there = replace(SAID, line=("case.py", 20))
    assert changes(SAID, replace(there, samples=(2,)), turned) == []
    assert changes(SAID, there, turned) == ["row: (2,) -> (1,)"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("code", {"answers": (("NS204", "certain"),)}),
        ("step", {"step": 4}),
        ("micro", {"micro": 1}),
        ("op", {"op": "aten.mm.default"}),
        ("module", {"module": "layers.2"}),
        ("row", {"samples": ()}),
        ("line", {"line": ("case.py", 21)}),
        ("failed", {"failed": "no summary.json was written"}),
    ],
)
def test_each_part_of_an_answer_counts(part: str, said: dict[str, Any]) -> None:
    heard = replace(replace(SAID, line=("case.py", 20)), **said)
    (change,) = changes(SAID, heard, made_by(Rewrite("plain", keep)))
    assert change.startswith(part)


def truth(**more: Any) -> Truth:
    given: dict[str, Any] = {
        "name": "some",
        "title": "a mean over nothing",
        "class": "empty_denominator",
        "codes": ("NS205",),
        "kind": "loud",
        "phase": "loss",
        "op": ("aten.div*",),
        "step": 1,
        "micro": 0,
        "cure": "data",
    }
    return Truth.model_validate(given | more)


BIRTH = {"step": 1, "micro": 0, "phase": "forward", "op": "aten.div.Tensor", "module": ""}
RAN = Plain((1.0, 2.0), (BIRTH,), {"loss": (1, 0)}, 4, "ok", 0)


@pytest.mark.parametrize(
    ("why", "ran"),
    [
        ("", {}),
        ("", {"births": ({**BIRTH, "op": "aten.reciprocal.default"},)}),
        ("", {"printed": (1.001, 2.0)}),
        ("other numbers", {"printed": (1.5, 2.0)}),
        ("ended otherwise", {"ended": "RuntimeError"}),
        ("3 steps", {"steps": 3}),
        ("loss not finite at", {"first": {"loss": (2, 0)}}),
        ("the operation", {"births": ({**BIRTH, "op": "aten.mm.default"},)}),
        ("did not end", {"code": None}),
    ],
)
def test_a_variant_that_fails_otherwise_is_left_out(why: str, ran: dict[str, Any]) -> None:
    found = difference(RAN, replace(RAN, **ran), truth(), Rewrite("plain", keep))
    assert found.startswith(why) if why else not found


def test_a_silent_case_is_known_by_its_numbers_alone() -> None:
    silent = truth(kind="silent", op=(), step=None)
    other = Rewrite("other", keep, keeps_numbers=False)
    assert difference(RAN, RAN, silent, other).startswith("other numbers")
