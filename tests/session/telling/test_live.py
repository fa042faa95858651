"""What a run tells whoever follows it, and that it tells nobody else anything."""

import itertools
import math

import pytest
import torch

import nanstop
from nanstop.records import Atom, Trial
from nanstop.session.history import History
from nanstop.session.telling.live import Live, Search
from nanstop.store.live_file import LIVE, LiveLines, Wish


class Clock:
    """Counts up by ``pace`` at each look at it."""

    def __init__(self, pace=0.0):
        self.now, self.pace = 100.0, pace

    def __call__(self):
        self.now += self.pace
        return self.now


def told(folder):
    return LiveLines(folder).new()[0]


def series_of(lines, name="loss_raw"):
    return [tuple(point) for line in lines for point in line.get("series", {}).get(name, ())]


def test_without_a_follower_nothing_is_written_or_read(tmp_path):
    class Unread:
        def __float__(self):
            pytest.fail("a value was read")

    history, clock = History(), Clock()
    live = Live(tmp_path, [history], clock=clock)
    live.begin(host="loop")
    for step in range(10):
        history.add("loss_raw", step, Unread())
        live.stepped(step)
        clock.now += 10
    live.stage("replay", 9)
    live.end(0)
    assert list(tmp_path.iterdir()) == []


def test_a_follower_who_comes_late_is_told_what_is_kept(tmp_path):
    history, clock = History(kept=4), Clock()
    live = Live(tmp_path, [history], clock=clock)
    live.begin(host="loop")
    for step in range(10):
        history.add("loss_raw", step, torch.tensor(2.0 + step))
        live.stepped(step)
    Wish(tmp_path).renew()
    clock.now += 2
    live.stepped(9)
    history.add("loss_raw", 10, math.nan)
    live.end(0)
    header, *lines = told(tmp_path)
    assert header["host"] == "loop"
    assert [step for step, _ in series_of(lines)] == [6, 7, 8, 9, 10]
    assert math.isnan(series_of(lines)[-1][1])
    assert lines[-1]["end"] == 0


def test_it_is_asked_for_at_most_once_a_second(tmp_path):
    Wish(tmp_path).renew()
    history, clock = History(), Clock()
    live = Live(tmp_path, [history], clock=clock, processor=clock)
    live.begin()
    for step in range(100):
        history.add("loss_raw", step, 1.0)
        live.stepped(step)
        clock.now += 0.1
    assert 9 <= len(told(tmp_path)) - 1 <= 11
    live.end(0)
    assert [step for step, _ in series_of(told(tmp_path))] == list(range(100))


def test_the_dearer_a_line_the_longer_until_the_next(tmp_path):
    Wish(tmp_path).renew()
    history, clock = History(), Clock(pace=0.01)  # each look at the clock takes 10 ms
    live = Live(tmp_path, [history], clock=clock, processor=lambda: clock.now)
    live.begin()
    written = []
    for step in range(400):
        clock.now += 1.0
        Wish(tmp_path).renew()
        history.add("loss_raw", step, 1.0)
        before = len(told(tmp_path)) if (tmp_path / LIVE).exists() else 0
        live.stepped(step)
        if len(told(tmp_path)) > before:
            written.append(step)
    live.end(0)
    later = [b - a for a, b in itertools.pairwise(written[2:])]
    assert later
    assert min(later) >= 30  # 20 ms in 40 s are half a thousandth


def test_a_window_that_was_redone_is_told_as_it_went_on(tmp_path):
    Wish(tmp_path).renew()
    history = History()
    live = Live(tmp_path, [history], clock=Clock())
    live.begin()
    history.add("loss_raw", 0, math.inf)
    history.take_back("loss_raw", 1)
    history.add("loss_raw", 0, 3.0)
    live.stepped(0)
    live.end(0)
    assert series_of(told(tmp_path)) == [(0, 3.0)]


def test_another_training_is_told_anew(tmp_path):
    Wish(tmp_path).renew()
    history = History()
    live = Live(tmp_path, [history], clock=Clock())
    for value in (1.0, 2.0):
        live.begin()
        history.add("loss_raw", 0, value)
        live.stepped(0)
        live.end(0)
    assert series_of(told(tmp_path)) == [(0, 2.0)]


def test_a_disk_that_fails_ends_the_telling_and_not_the_run(tmp_path, caplog):
    Wish(tmp_path).renew()
    (tmp_path / LIVE).mkdir()
    history = History()
    live = Live(tmp_path, [history], clock=Clock())
    live.begin()
    for step in range(3):
        history.add("loss_raw", step, 1.0)
        live.stepped(step)
    live.end(0)
    assert len([line for line in caplog.messages if "no longer be followed" in line]) == 1


def test_stages_and_trials_are_told(tmp_path):
    Wish(tmp_path).renew()
    live = Live(tmp_path, [History()], clock=Clock())
    live.begin()
    live.stage("proof", 4, Search(40, 60.0))
    live.tried(Trial(atoms=(Atom(remedy="bf16"),), outcome="same_failure"))
    live.tried(Trial(atoms=(Atom(remedy="island", target="norm"),), outcome="pass"))
    live.stage("", 4)
    lines = told(tmp_path)[1:]
    assert [line["stage"] for line in lines] == ["proof", "proof", "proof", ""]
    assert (lines[0]["trials"], lines[0]["seconds"]) == (40, 60.0)
    assert [line.get("best") for line in lines[1:3]] == ["", "keep `norm` in float32"]


def train(folder, *, watched):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch = nanstop.watch(model, optimizer, out=folder) if watched else None
    for _ in range(12):
        batch = torch.randn(16, 4)
        if watch is not None:
            watch.step(lambda rows: model(rows).square().mean(), batch)
            watch.update(clip=1.0)
            continue
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def test_a_run_that_is_followed_computes_the_same_bits(tmp_path):
    Wish(tmp_path).renew()
    plain, followed = train(tmp_path, watched=False), train(tmp_path, watched=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, followed, strict=True))
    assert series_of(told(tmp_path), "grad_norm")
