"""Memory that nobody writes and somebody reads."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import nanstop
from fnstep import FnStep
from nanstop.localize.localize import localize
from nanstop.localize.memory.unwritten import of_unwritten, unwritten_read
from nanstop.records import Unwritten
from nanstop.replay.conditions import filled_memory
from nanstop.tracing.definitions.once_more import unwritten

ROWS, WIDTH, EXTRA = 24, 8, 6
OFFSETS = torch.tensor([8, 10, ROWS - EXTRA], dtype=torch.int32)

grouped = pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="torch has none")


def leave(value, shape, dtype=torch.float32):
    """Leave a value in memory that tensors of a shape will lie in."""
    del [torch.full(shape, value, dtype=dtype) for _ in range(8)][:]


class Padded(nn.Module):
    """Writes some of the rows that it takes; ``filled``: all of them."""

    def __init__(self, *, filled, reads_all=True):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.filled, self.reads_all = filled, reads_all

    def forward(self, x):
        shape = (ROWS + EXTRA, WIDTH)
        out = torch.zeros(shape) if self.filled else torch.empty(shape)
        out[:ROWS] = torch.tanh(self.first(x))
        return self.last(out if self.reads_all else out[:ROWS])


class Grouped(nn.Module):
    """``masked``: what is not written of the product is hidden, its gradient is not."""

    def __init__(self, *, masked):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 16, dtype=torch.bfloat16))
        self.masked = masked

    def forward(self, x):
        rows = self.first(x).to(torch.bfloat16)
        out = functional.grouped_mm(rows, self.experts, offs=OFFSETS)
        absent = (torch.arange(len(out)) >= OFFSETS[-1])[:, None]
        return out.masked_fill(absent, 0.0) if self.masked else out * ~absent


def step_of(model):
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, WIDTH)}
    return FnStep(model, lambda m, b: m(b["x"]).float().square().mean(), [batch])


def found_in(step):
    found = localize(step, 0)
    return of_unwritten(step, 0, found) or found


def test_memory_that_is_read_before_it_is_written():
    found = unwritten_read(step_of(Padded(filled=False)), 0)
    assert found.first_bad.name == "empty"
    assert found.first_bad.unwritten == Unwritten()
    assert (found.confidence, found.reaches[0]) == ("certain", "loss")


@pytest.mark.parametrize(
    "model", [Padded(filled=True), Padded(filled=False, reads_all=False), nn.Linear(WIDTH, 1)]
)
def test_what_is_not_read_or_written_in_full_is_healthy(model):
    assert unwritten_read(step_of(model), 0) is None


@pytest.mark.parametrize("value", [3e38, float("nan")])
def test_a_failure_goes_back_to_the_memory_and_not_to_the_overflow_of_what_was_left_there(value):
    step = step_of(Padded(filled=False))
    with nullcontext() if value > 0 else filled_memory():
        leave(value, (ROWS + EXTRA, WIDTH))
        found = found_in(step)
    assert found.first_bad.name == "empty"
    assert found.first_bad.unwritten is not None


def test_an_overflow_beside_written_memory_stays_one():
    model = Padded(filled=True)
    with torch.no_grad():
        model.last.weight.fill_(1e25)
    found = found_in(step_of(model))
    assert (found.first_bad.name, found.first_bad.unwritten) == ("pow", None)


@grouped
@pytest.mark.parametrize(("masked", "phase"), [(False, "forward"), (True, "backward")])
def test_rows_behind_the_last_group(masked, phase):
    found = unwritten_read(step_of(Grouped(masked=masked)), 0)
    assert (found.first_bad.name, found.first_bad.phase) == ("_grouped_mm", phase)
    assert found.first_bad.unwritten.rows == (ROWS - EXTRA, ROWS - 1)


@grouped
def test_only_what_is_not_written_counts():
    func = torch.ops.aten._grouped_mm.default
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    weight = torch.randn(3, WIDTH, 16, dtype=torch.bfloat16)
    with filled_memory():
        out = func(rows, weight, OFFSETS)
    left = unwritten(func, (rows, weight, OFFSETS), {}, [out], (out.isnan(),))
    assert left == Unwritten(count=EXTRA * 16, rows=(ROWS - EXTRA, ROWS - 1))
    rows[0] = torch.inf
    with filled_memory():
        out = func(rows, weight, OFFSETS)
    assert unwritten(func, (rows, weight, OFFSETS), {}, [out], (out.isnan(),)) is None


@grouped
@pytest.mark.parametrize("masked", [False, True])
def test_memory_in_which_many_others_have_left_nan(masked):
    """As in a process that has run for long: thousands of holes that a result may lie in."""
    kept, given = [], []
    for number in range(20_000):
        for rest in (0, 8, number % 8):
            given.append(torch.full((ROWS, WIDTH + rest), torch.nan, dtype=torch.bfloat16))
            kept.append(torch.zeros(3))
    given.clear()
    assert all(unwritten_read(step_of(Grouped(masked=masked)), 0) for _ in range(5))
    del kept[:]


def test_settings_are_those_of_before():
    def settings():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = settings()
    with filled_memory():
        assert torch.empty(3).isnan().all()
        with filled_memory(filled=False):
            leave(1.0, (3,))
            assert torch.empty(3).isfinite().all()
    assert settings() == before


@grouped
@pytest.mark.parametrize("masked", [False, True])
def test_the_run_goes_on_with_zeros_there(tmp_path, masked):
    torch.manual_seed(0)
    model = Grouped(masked=masked)
    batches = [{"x": torch.randn(ROWS, WIDTH)} for _ in range(4)]

    def loss(batch):
        return model(batch["x"]).float().square().mean()

    with nanstop.watch(model, torch.optim.SGD(model.parameters(), 1e-3), out=tmp_path) as watch:
        for number, batch in enumerate(batches):
            if number == 2:
                for width in (WIDTH, 16):
                    leave(float("nan"), (ROWS, width), torch.bfloat16)
            watch.step(loss, batch)
            watch.update()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    told = [*watch.findings, *(one for r in watch.incidents for one in r.diagnoses)]
    assert {one.code for one in told} - {"NS111"} == {"NS603"}  # weights in bfloat16
    for report in watch.incidents:
        assert report.proof.verdict == "proven"
        assert [atom.remedy for atom in report.proof.minimal] == ["memory_fill"]
