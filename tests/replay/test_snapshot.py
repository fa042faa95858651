"""Snapshots, the way back to them, what they may cost, and buffers that a forward moved."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch.utils._pytree import tree_map_only
from transformers import LlamaForCausalLM

import tiny
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.rewind import Rewind, SnapshotKeeper
from nanstop.replay.copies.snapshot import Snapshot, Trainable, ready_scaler
from work import Elements


class Training:
    """A linear model with AdamW, and with a scaler if asked for."""

    def __init__(self, scaled: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
        )

    def trainable(self) -> Trainable:
        return Trainable(dict(self.model.named_parameters()), self.optimizer, self.scaler)

    def update(self) -> None:
        loss = self.model(torch.ones(2, 8)).square().sum()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def state(self) -> str:
        scaler = self.scaler.state_dict() if self.scaler is not None else None
        state = (self.model.state_dict(), self.optimizer.state_dict(), scaler)
        return repr(tree_map_only(torch.Tensor, torch.Tensor.tolist, state))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("num_updates", [0, 3])
def test_restoring_gives_back_the_same_training(scaled, num_updates):
    run = Training(scaled)
    for _ in range(num_updates):
        run.update()
    snapshot, before = Snapshot(run.trainable()), run.state()
    objects = [id(p) for p in run.model.parameters()]
    for group in run.optimizer.param_groups:
        group["lr"] = 0.5
    run.update()
    after = run.state()
    assert after != before
    with snapshot.loaded():
        assert run.state() == before
    assert run.state() == after
    snapshot.restore()
    assert run.state() == before
    assert [id(p) for p in run.model.parameters()] == objects
    run.update()
    run.update()


def test_rewound_comes_back_to_broken_weights_bitwise():
    run = Training()
    rewind = Rewind(Snapshot(run.trainable()), ())
    run.update()
    run.model.weight.data[0, 0] = float("nan")
    broken = run.state()
    with rewind.rewound():
        assert run.model.weight.isfinite().all()
    assert run.state() == broken
    rewind.restore()
    assert run.model.weight.isfinite().all()


def test_parameters_added_since_the_snapshot_stay_out_of_the_way_back():
    run = Training()
    added = torch.nn.Parameter(torch.ones(3))
    rewind = Rewind(Snapshot(run.trainable()), ())
    run.update()
    run.optimizer.add_param_group({"params": [added], "lr": 0.7})
    after = run.state()
    with rewind.rewound():
        assert len(run.optimizer.param_groups) == 1
        assert not added.requires_grad
        run.update()
    assert run.state() == after
    assert run.optimizer.param_groups[1]["params"] == [added]
    assert added.requires_grad
    rewind.restore()
    assert run.optimizer.param_groups[1]["lr"] == 0.7


def test_a_scaler_can_unscale_again_once_it_is_ready():
    run = Training(scaled=True)
    run.scaler.scale(run.model(torch.ones(2, 8)).sum()).backward()
    run.scaler.unscale_(run.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        run.scaler.unscale_(run.optimizer)
    ready_scaler(run.scaler)
    run.scaler.unscale_(run.optimizer)
    ready_scaler(None)


@dataclass
class Window:
    """All that the keeper looks at of a step."""

    index: int
    batches: tuple = ({"input_ids": torch.zeros(2, 8, dtype=torch.int64), "note": "text"},)
    held: object = None


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def indices(keeper: SnapshotKeeper) -> list[int]:
    return [step.index for step in keeper.rewind().steps]


class TestKeeper:
    def test_the_first_snapshot_is_before_the_first_update(self):
        run = Training()
        keeper = SnapshotKeeper(lambda: 1 << 30)
        assert keeper.rewind() is None
        before = run.state()
        keeper.before_update(run.trainable, Window(0))
        run.update()
        rewind = keeper.rewind()
        assert rewind.steps == (Window(0),)
        rewind.restore()
        assert run.state() == before

    def test_windows_since_the_snapshot_are_kept_until_the_next_one(self):
        run = Training()
        # An unlimited share of the time: a snapshot before every update.
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e9, least_updates=1)
        for step in range(3):
            keeper.before_update(run.trainable, Window(step))
            run.update()
            assert indices(keeper) == [step]

    def test_the_first_updates_are_all_kept_however_cheap_a_snapshot_is(self):
        run = Training()
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e9)
        for step in range(17):
            keeper.before_update(run.trainable, Window(step))
            run.update()
            assert indices(keeper) == list(range(step + 1)) if step < 16 else [16]
        # No time at all: the one before update 0 stays.
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e-9)
        for step in range(3):
            keeper.before_update(run.trainable, Window(step))
            run.update()
        assert indices(keeper) == [0, 1, 2]

    @pytest.mark.parametrize("unfreeze", ["new_group", "flag"])
    def test_parameters_that_join_the_training_call_for_a_new_snapshot(self, unfreeze):
        run = Training()
        if unfreeze == "new_group":
            run.optimizer = torch.optim.AdamW([run.model.weight], lr=0.1)
        run.model.bias.requires_grad_(False)
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e-9)
        keeper.before_update(run.trainable, Window(0))
        run.update()
        run.model.bias.requires_grad_(True)
        if unfreeze == "new_group":
            run.optimizer.add_param_group({"params": [run.model.bias]})
        for step in (1, 2):
            keeper.before_update(run.trainable, Window(step))
            run.update()
        assert indices(keeper) == [1, 2]
        assert set(keeper.snapshot.parameters) == {"weight", "bias"}

    def test_too_little_memory_is_a_reason(self):
        run = Training()
        keeper = SnapshotKeeper(lambda: 1000)
        keeper.before_update(run.trainable, Window(0))
        assert keeper.rewind() is None
        assert "1000 bytes of memory are free" in keeper.reason

    @pytest.mark.parametrize("limit", [{"max_windows": 2}, {"max_window_bytes": 90_000}])
    def test_a_snapshot_that_is_too_far_back_is_dropped_with_a_reason(self, limit):
        run = Training()
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e-12, late_share=1e-12, **limit)
        for step in range(4):
            keeper.before_update(run.trainable, Window(step))
        assert keeper.rewind() is None
        assert keeper.reason == (
            "3 updates since the last snapshot (98688 bytes of batches and notes) "
            "are more than are kept"
        )

    @pytest.mark.parametrize(
        ("cost", "covered", "share"),
        [(0.1, 1.0, 0.005), (1.0, 1.0, 0.005), (4.0, 1.0, 0.01), (20.0, 0.25, 0.01)],
    )
    def test_the_next_snapshot_comes_before_the_way_back_ends_where_time_allows(
        self, cost, covered, share
    ):
        """``cost`` of a snapshot in steps; of 20000 updates ``covered`` have a way back."""
        clock, run, taken, missing = Clock(), Training(), [], 0

        def trainable():
            taken.append(clock.seconds)
            clock.seconds += cost / 3 if len(taken) == 1 else cost  # no optimizer state yet
            return run.trainable()

        run.update()
        keeper = SnapshotKeeper(lambda: 1 << 30, clock=clock)
        for step in range(20_000):
            keeper.before_update(trainable, Window(step, batches=()))
            missing += keeper.rewind() is None
            clock.seconds += 1.0
        assert 1.0 - missing / 20_000 == pytest.approx(covered, abs=0.02)
        assert cost * (len(taken) - 1) <= share * clock.seconds
        assert len(taken) > 5

    def test_what_is_noted_beside_the_batches_counts(self):
        run = Training()
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e-12, late_share=1e-12)
        for step in range(300):
            keeper.before_update(run.trainable, Window(step, batches=({},) * 64))
        assert keeper.rewind() is None
        assert "bytes of batches" in keeper.reason

    def test_a_later_snapshot_uses_the_memory_of_the_one_before(self):
        run = Training()
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e9, least_updates=1)
        places = []
        for step in range(3):
            if step == 2:
                run.model.bias.data = torch.zeros(8, dtype=torch.float64)
            keeper.before_update(run.trainable, Window(step))
            before = run.state()
            places.append({n: k.copy.data_ptr() for n, k in keeper.snapshot.parameters.items()})
            if step < 2:
                run.update()
        assert places[0] == places[1]
        assert places[1]["weight"] == places[2]["weight"]
        assert keeper.snapshot.parameters["bias"].copy.dtype == torch.float64
        run.model.weight.data.zero_()
        keeper.rewind().restore()
        assert run.state() == before

    def test_the_first_update_of_another_optimizer_begins_anew(self):
        first, second = Training(), Training()
        keeper = SnapshotKeeper(lambda: 1 << 30)
        for index, run in enumerate((first, first, second, second, first)):
            keeper.of(run.optimizer)
            keeper.before_update(run.trainable, Window(index))
            if index == 2:
                assert keeper.snapshot.trainable.optimizer is second.optimizer
        assert keeper.rewind() is None  # of what was updated last
        keeper.of(second.optimizer)
        keeper.before_update(second.trainable, Window(5))
        assert keeper.rewind() is None  # of what has taken turns with others since

    def test_a_new_optimizer_in_every_step_is_not_a_training_each(self):
        keeper, taken = SnapshotKeeper(lambda: 1 << 30, time_share=1e-12, late_share=1e-12), []
        for index in range(40):
            run = Training()
            keeper.of(run.optimizer)
            keeper.before_update(run.trainable, Window(index))
            if keeper.snapshot not in taken:
                taken.append(keeper.snapshot)
        assert len(taken) == 8

    @pytest.mark.slow
    def test_models_that_a_script_lets_go_of_are_not_kept(self):
        keeper, models = SnapshotKeeper(lambda: 1 << 30, time_share=1e-12, late_share=1e-12), []
        for index in range(120):
            run = Training()
            models.append(weakref.ref(run.model))
            keeper.of(run.optimizer)
            keeper.before_update(run.trainable, Window(index, held=run.model))
            del run
            gc.collect()
            assert sum(model() is not None for model in models) <= 1
        assert models[-1]() is None

    def test_broken_weights_are_not_even_copied(self):
        run = Training()
        run.model.weight.data[0] = float("nan")
        keeper = SnapshotKeeper(lambda: 1 << 30)
        with Elements() as work:
            keeper.before_update(run.trainable, Window(0))
        assert keeper.rewind() is None
        assert work.num_made < 64

    def test_broken_weights_are_never_taken(self):
        run = Training()
        keeper = SnapshotKeeper(lambda: 1 << 30, time_share=1e9)
        keeper.before_update(run.trainable, Window(0))
        run.model.weight.data[0] = float("inf")
        keeper.before_update(run.trainable, Window(1))
        assert indices(keeper) == [0, 1]
        assert keeper.snapshot.nonfinite() == ()


class TestBuffers:
    def test_running_statistics_are_put_back(self):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).eval())
        notes = BufferNotes(model)
        first = notes.note()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(torch.full((3, 4), float("nan")))
        assert model[0].running_mean.isnan().all()
        second = notes.note()
        notes.restore(first)
        assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
        notes.restore(second)
        assert model[0].running_mean.isnan().all()

    def test_only_what_moved_is_copied(self):
        model = torch.nn.Module()
        model.register_buffer("still", torch.zeros(4))
        model.register_buffer("moving", torch.zeros(4))
        notes = BufferNotes(model)
        first = notes.note()
        model.moving.add_(1)
        second = notes.note()
        pairs = zip(first.buffers, second.buffers, strict=True)
        assert [a is b for a, b in pairs] == [True, False]
        notes.restore(first)
        assert torch.equal(model.moving, torch.zeros(4))

    def test_what_a_parameter_carries_is_put_back(self):
        model = torch.nn.Linear(2, 2)
        model.weight.of_samples, model.weight.num_calls = [], 0
        notes = BufferNotes(model)
        first = notes.note()
        model.weight.of_samples.append(torch.ones(3))
        model.weight.num_calls, model.weight.left = 1, "left"
        with notes.kept(first):
            notes.restore(first)
            assert vars(model.weight) == {"of_samples": [], "num_calls": 0}
        assert (len(model.weight.of_samples), model.weight.left) == (1, "left")
        with notes.rewritten(first):
            notes.restore(first)
        assert (len(model.weight.of_samples), model.weight.num_calls) == (1, 1)

    def test_marks_of_parameters_cost_nothing(self, tmp_path):
        """transformers leaves one on each parameter that it has loaded."""
        tiny.llama().save_pretrained(tmp_path)
        model = LlamaForCausalLM.from_pretrained(tmp_path)
        assert not BufferNotes(model).note().carried

    def test_a_buffer_that_was_replaced_is_the_old_object_again(self):
        model = torch.nn.BatchNorm1d(4)
        notes = BufferNotes(model)
        first, old = notes.note(), model.running_mean
        model.running_mean = torch.ones(4)
        notes.restore(first)
        assert model.running_mean is old
        assert torch.equal(old, torch.zeros(4))

    def test_a_buffer_that_did_not_move_keeps_its_version(self):
        """A script's own tensor may be one: its recorded calls read it as it was then."""
        weights = torch.ones(4)
        notes = BufferNotes(torch.nn.CrossEntropyLoss(weight=weights))
        first, was = notes.note(), weights._version
        notes.restore(first)
        assert weights._version == was

    def test_a_buffer_that_was_written_without_a_version_is_put_back(self):
        model = torch.nn.BatchNorm1d(4)
        notes = BufferNotes(model)
        first = notes.note()
        model.running_mean.data.fill_(3.0)
        notes.restore(first)
        assert torch.equal(model.running_mean, torch.zeros(4))
