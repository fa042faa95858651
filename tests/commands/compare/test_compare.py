"""Two recorded runs: where they part is found in series, micro-batches and operations, and equal
runs agree.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from incident_records import report
from nanstop import cli
from nanstop.commands.compare.compare import ComparedRun, RunComparison, compare, load_run, render
from nanstop.errors import NanstopError
from nanstop.records import Localization, OpEvent, Series, StepId, TensorStats
from nanstop.records.codec import from_json, to_json
from nanstop.store.incidents import Store
from nanstop.store.summary import Summary, summary_row

LOOP = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(605):
    optimizer.zero_grad()
    rows = torch.randn(8, 4) * (float(sys.argv[1]) if step >= 600 else 1.0)
    net(rows).square().mean().backward()
    optimizer.step()
"""


def run(**series):
    """A run with one value a step in each series."""
    return ComparedRun(
        "r", {name: {i: [v] for i, v in enumerate(values)} for name, values in series.items()}
    )


def recorded(folder, *reports):
    store = Store(folder)
    for one in reports:
        incident_id, _ = store.open_incident()
        store.write_report(replace(one, incident=replace(one.incident, id=incident_id)))
    return folder


def at_step(step, values=(), *, ranges=None):
    """An incident at ``step`` that remembers ``values`` as (step, loss), and the ranges of
    operations.
    """
    one = report(at=StepId(run="r", step=step, micro=0))
    steps, losses = zip(*values, strict=True) if values else ((), ())
    history = (Series(name="loss_raw", steps=steps, values=losses),) if values else ()
    one = replace(one, incident=replace(one.incident, history=history))
    if ranges is None:
        return one
    events = tuple(
        OpEvent(
            index=index,
            phase="forward",
            op="aten.mm.default",
            module=f"layers.{index}",
            outputs=(TensorStats(shape=(2,), dtype="float16", absmax=absmax),),
        )
        for index, absmax in enumerate(ranges)
    )
    place = Localization(
        key=one.localization.key, first_bad=None, origin="born_here", growth=events
    )
    return replace(one, localization=place)


def test_the_first_step_that_is_apart_and_the_first_that_differs_at_all():
    first = run(loss=[3.0, 2.0, 1.0, 1.0], norm=[1.0, 1.0, 1.0, 9.0], lr=[0.1] * 4)
    second = run(loss=[3.0, 2.001, 1.2, 1.0], norm=[1.0, 1.0, 1.0, 1.0], lr=[0.1] * 4)
    found = compare(first, second)
    assert (found.step, found.series, found.agrees) == (2, "loss", False)
    loss, norm, lr = found.rows
    assert (loss.first_difference, loss.first_divergence, loss.a, loss.b) == (1, 2, 1.0, 1.2)
    assert loss.largest == pytest.approx(1 / 6)
    assert norm.first_divergence == 3
    assert (lr.first_difference, lr.first_divergence) == (None, None)
    assert compare(first, second, tolerance=0.5).step == 3
    assert compare(first, second, tolerance=0.0).step == 1


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20), st.integers(0, 19), st.floats(1.1, 9.0)
)
def test_equal_runs_agree_and_one_changed_value_is_found(values, place, factor):
    assert compare(run(loss=values), run(loss=values), tolerance=0.0).agrees
    place %= len(values)
    changed = list(values)
    changed[place] = (
        1.0 if not math.isfinite(values[place]) or values[place] == 0.0 else values[place] * factor
    )
    found = compare(run(loss=values), run(loss=changed))
    assert (found.step, found.series) == (place, "loss")


def test_what_one_run_alone_has_is_said():
    found = compare(run(loss=[1.0], kl=[0.5]), run(loss=[1.0], grad_norm=[1.0]))
    assert found.agrees
    assert "only in A: kl\n  only in B: grad_norm" in render(found)


def test_each_micro_batch_of_a_step_is_compared():
    first = ComparedRun("a", {"loss_raw": {0: [1.0, 2.0], 1: [3.0, 4.0]}})
    second = ComparedRun("b", {"loss_raw": {0: [1.0, 2.0], 1: [3.0, 5.0]}})
    (row,) = compare(first, second).rows
    assert (row.first_divergence, row.a, row.b, row.num_steps) == (1, 4.0, 5.0, 2)


def test_incidents_bring_their_histories_and_name_the_layer(tmp_path):
    first = recorded(
        tmp_path / "a",
        at_step(2, [(0, 3.0), (1, 2.0), (2, 1.0)], ranges=[10.0, 20.0, 6e4]),
        at_step(4, [(2, 1.0), (3, 1.0), (4, 7.0)]),
    )
    second = recorded(
        tmp_path / "b", at_step(2, [(0, 3.0), (1, 2.0), (2, 1.0)], ranges=[10.0, 25.0, 6e4])
    )
    a, b = load_run(first), load_run(second)
    assert dict(a.series["loss_raw"]) == {0: [3.0], 1: [2.0], 2: [1.0], 3: [1.0], 4: [7.0]}
    found = compare(a, b)
    assert found.step is None
    assert (found.layer.step, found.layer.module) == (2, "layers.1")
    assert found.layer.why == "max 20 in A, 25 in B"
    assert not found.agrees
    assert len(found.incidents_a) == 2
    assert "layer: `aten.mm.default` in `layers.1`, step 2" in render(found)
    assert from_json(RunComparison, to_json(found)) == found


def test_an_incident_of_one_run_only_is_where_its_layers_part(tmp_path):
    first = recorded(tmp_path / "a", at_step(2, [(2, math.nan)]), at_step(9, ranges=[1.0]))
    second = recorded(tmp_path / "b", at_step(9, [(2, 1.0)], ranges=[1.0]))
    found = compare(load_run(first), load_run(second))
    assert (found.step, found.series) == (2, "loss_raw")
    assert (found.layer.step, found.layer.module) == (2, "model.layers.2.norm")
    assert found.layer.why == "NS201 in A only"
    assert math.isinf(found.rows[0].largest)


def trainer_state(folder, losses, checkpoint="checkpoint-2"):
    rows = [
        {"loss": v, "grad_norm": 1.0, "epoch": 0.1, "step": i + 1} for i, v in enumerate(losses)
    ]
    rows.append({"train_loss": 1.0, "train_runtime": 3.0, "step": len(losses)})
    place = folder / checkpoint
    place.mkdir(parents=True, exist_ok=True)
    (place / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder


def test_what_a_trainer_saved_is_a_record_too(tmp_path, capsys):
    first = trainer_state(tmp_path / "a", [3.0, 2.0])
    trainer_state(first, [3.0, 2.0, math.nan], "checkpoint-10")
    second = trainer_state(tmp_path / "b", [3.0, 2.0, 1.0])
    assert cli.main(["compare", str(first), str(second), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["series"]) == (3, "logged_loss")
    assert found["rows"][0]["a"] == "NaN"
    assert [row["name"] for row in found["rows"]] == ["logged_loss", "logged_grad_norm"]
    assert cli.main(["compare", str(first), str(first)]) == 0
    text = capsys.readouterr().out
    assert "no number differs by more than 1 %" in text
    assert "logged_loss (3 steps): equal" in text


@pytest.mark.slow
def test_a_run_that_was_asked_to_keeps_all_its_numbers(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP)
    for name, scale in (("a", "1.0"), ("b", "1.1")):
        command = ["run", "--series", "--out", name, "loop.py", scale]
        assert cli.main(command) == 0
        assert sorted(one.name for one in Path(name).iterdir()) == ["series.json", "summary.json"]
    assert cli.main(["compare", "a", "b", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert (found["step"], found["series"]) == (600, "loss_raw")
    loss, norm = found["rows"][1], found["rows"][0]
    assert (loss["num_steps"], loss["first_difference"]) == (605, 600)
    assert norm["name"] == "grad_norm"
    assert cli.main(["run", "--out", "a", "loop.py", "1.0"]) == 0
    with pytest.raises(NanstopError, match="nothing is recorded in a"):
        load_run("a")


HEALTHY = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)
net = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for step in range(20):
    if step == 9:
        net[2].weight.data.mul_(float(sys.argv[1]))
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
torch.save([*net.parameters(), torch.get_rng_state()], sys.argv[2])
"""


@pytest.mark.slow
def test_healthy_runs_are_told_apart_by_the_first_layer_that_parts(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(HEALTHY)
    for name, scale in (("a", "1.0"), ("b", "1.3")):
        command = ["run", "--series", "--out", name, "loop.py", scale, f"{name}.pt"]
        assert cli.main(command) == 0
    assert cli.main(["run", "--out", "c", "loop.py", "1.0", "c.pt"]) == 0
    assert all(map(torch.equal, torch.load("a.pt"), torch.load("c.pt")))
    found = compare(load_run("a"), load_run("b"))
    assert (found.step, found.series) == (9, "loss_raw")
    assert (found.layer.step, found.layer.module, found.layer.op) == (16, "2", "")
    assert found.range_steps == (0, 1, 2, 4, 8, 16)
    assert {row.name for row in found.rows} == {"grad_norm", "loss_raw", "lr"}
    assert "layer: `2`, step 16: max " in render(found)
    assert from_json(RunComparison, to_json(found)) == found
    assert cli.main(["compare", "a", "a"]) == 0
    assert "no range of a module differs by more (steps 0, 1, 2" in capfd.readouterr().out


def test_the_earliest_layer_counts_whatever_told_of_it():
    place = at_step(5, ranges=[1.0])
    other = at_step(5, ranges=[3.0])
    for step, module in ((4, "x"), (8, "layers.0")):
        ranges = {"x": {0: [1.0], step: [1.0]}, "only_a": {0: [1.0]}}
        changed = {"x": {0: [1.0], step: [2.0]}}
        found = compare(
            ComparedRun("a", ranges=ranges, reports=(place,)),
            ComparedRun("b", ranges=changed, reports=(other,)),
        )
        assert found.layer.module == module


def test_incidents_of_an_earlier_run_in_the_folder_do_not_count(tmp_path):
    folder = recorded(tmp_path / "a", at_step(2, [(2, 1.0)]), at_step(9, [(9, 1.0)]))
    rows = tuple(map(summary_row, load_run(folder).reports))
    Store(folder).write_summary(Summary(incidents=rows[1:]))
    assert list(load_run(folder).series["loss_raw"]) == [9]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such run"),
        ("empty", "nothing is recorded in"),
        ("broken", "not JSON"),
        ("strange", "no log_history"),
        ("tampered", "schema 99"),
    ],
)
def test_what_is_no_record_is_said(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    for each, text in (("broken", "{"), ("strange", '{"log_history": 3}')):
        (tmp_path / each).mkdir()
        (tmp_path / each / "trainer_state.json").write_text(text)
    folder = recorded(tmp_path / "tampered", at_step(1))
    file = next(Path(folder).glob("*/report.json"))
    file.write_text(file.read_text().replace('"schema":1', '"schema":99'))
    with pytest.raises(NanstopError, match=message):
        load_run(tmp_path / name)


def test_runs_that_cannot_be_compared():
    with pytest.raises(NanstopError, match="nothing in common") as raised:
        compare(run(loss=[1.0]), run(norm=[1.0]))
    assert raised.value.hint == "A has loss; B has norm"
    with pytest.raises(NanstopError, match="at least 0"):
        compare(run(loss=[1.0]), run(loss=[1.0]), tolerance=-1.0)
