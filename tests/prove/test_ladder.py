"""How much is left decides what a cure is held against, and a run that memory is too short for is
no word on the step.
"""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.decide.policy import Policy
from nanstop.errors import ShortOfMemoryError
from nanstop.localize.localize import localize
from nanstop.numerics import room
from nanstop.prove import bad_samples
from nanstop.prove.failing_step import FailingStep, failing_step
from nanstop.prove.prove import prove_step
from nanstop.prove.reference import agreement, ladder
from nanstop.prove.reference.exact import ExactRuns
from nanstop.prove.reference.ladder import Ladder, Rung, region_of
from nanstop.prove.trials import Trials
from nanstop.records import Atom
from nanstop.replay import step as replay_step
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.rewind import Rewind
from nanstop.replay.copies.snapshot import Snapshot, Trainable
from nanstop.replay.held import swapped
from nanstop.replay.rerun import attempt, rerun
from nanstop.replay.step import trainable_of, undone
from nanstop.report.text.nearness import proof_in_brackets

ISLAND = (Atom(remedy="island", target="blocks.1.squared", value="float32->input"),)


class Squared(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.down(self.up(x).square()) * 1e-4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.squared, self.drop = nn.LayerNorm(width), Squared(width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.squared(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def failing():
    torch.manual_seed(0)
    net = Net().half()
    with torch.no_grad():
        net.blocks[1].squared.up.weight[0, 0] = 300.0
    batches = [{"x": 0.1 * torch.randn(8, 16).half()} for _ in range(2)]
    batches[0]["x"][0, 0] = 100.0
    step = FnStep(net, lambda net, batch: net(batch["x"]).float().square().mean(), batches)
    with torch.no_grad():
        net.blocks[1].norm.weight[0] = 1.0
    return FailingStep(step=step, micro=0, micros=(0,))


@pytest.mark.parametrize(("left", "is_bounded"), [(2**40, False), (2**25, True), (None, False)])
def test_what_a_run_takes_is_seen_where_a_wider_one_may_have_no_room(monkeypatch, left, is_bounded):
    """There is room for the step as it is: all that is wider is asked for before it is begun."""
    monkeypatch.setattr(room, "left_on", lambda _: left)
    given = failing()
    own = sum(p.nbytes for p in given.step.view.root.parameters())
    found = ladder.bounded(given, 0)
    assert (found.takes >= own) == is_bounded
    assert found == given or is_bounded
    assert found.step.view.root.blocks[0].norm.weight.grad is None


def proof_at(monkeypatch, *rungs, wider="finite"):
    """Prove with room for these rungs alone."""
    given = failing()
    place = localize(given.step, 0)
    assert place is not None
    monkeypatch.setattr(Ladder, "_has_room", lambda _, rung: rung in rungs)
    before = {name: p.clone() for name, p in given.step.view.root.named_parameters()}
    proof = prove_step(given, place.key, (ISLAND,), policy=Policy(), wider=wider)
    for name, p in given.step.view.root.named_parameters():
        assert (p.dtype, p.grad) == (torch.float16, None)
        assert torch.equal(p, before[name])
    return proof


def test_a_proof_by_parts_has_the_numbers_of_the_whole(monkeypatch):
    whole, parts = (proof_at(monkeypatch, rung) for rung in (Rung.WHOLE, Rung.PARTS))
    assert whole.verdict == parts.verdict == "proven", (whole.next_experiment, parts)
    assert (whole.scope, parts.scope) == ("micro-batch", "layer by layer")
    assert parts.reference.loss == whole.reference.loss
    assert parts.passing[0].loss_gap == whole.passing[0].loss_gap
    assert parts.passing[0].grad_gap == pytest.approx(whole.passing[0].grad_gap, rel=1e-6)
    assert "float32, layer by layer for want of memory" in proof_in_brackets(parts)


def test_a_proof_of_a_region_compares_what_it_gives(monkeypatch):
    proof = proof_at(monkeypatch, Rung.REGION)
    assert (proof.verdict, proof.scope) == ("proven", "region blocks.1"), proof.next_experiment
    assert 0.0 < proof.passing[0].loss_gap < 1e-2
    assert proof.passing[0].grad_cosine > 0.999
    assert "`blocks.1` alone was run in float32, for want of memory" in proof_in_brackets(proof)


@pytest.mark.parametrize("lacking", [Rung.WHOLE, Rung.PARTS])
def test_what_has_no_room_to_be_compared_is_held_against_less(monkeypatch, lacking):
    nearness, rungs = agreement.nearness, []
    ladder = Ladder.__init__

    def noted(self, *given):
        ladder(self, *given)
        rungs.append(self)

    def compared(own, true):
        if rungs[-1].rung <= lacking:
            raise MemoryError
        return nearness(own, true)

    monkeypatch.setattr(Ladder, "__init__", noted)
    monkeypatch.setattr(agreement, "nearness", compared)
    proof = proof_at(monkeypatch, *(rung for rung in Rung if rung >= lacking))
    expected = "layer by layer" if lacking is Rung.WHOLE else "region blocks.1"
    assert (proof.verdict, proof.scope) == ("proven", expected), proof.next_experiment


def test_a_cure_that_bends_the_region_is_not_proven(monkeypatch):
    from nanstop.remedies import precision

    def bent(module, _inputs, output):
        return output * 1.5

    given = failing()
    place = localize(given.step, 0)
    monkeypatch.setattr(Ladder, "_has_room", lambda _, rung: rung is Rung.REGION)
    block = given.step.view.root.blocks[1]
    bending = (block.squared, block)
    whole = precision.Float32Forward.call
    monkeypatch.setattr(
        precision.Float32Forward,
        "call",
        lambda self, *args: whole(self, *args) * (1.5 if self.module in bending else 1.0),
    )
    proof = prove_step(given, place.key, (ISLAND,), policy=Policy())
    assert proof.verdict == "plausible"


@pytest.mark.parametrize(
    ("wider", "outcome"), [("finite", "pass"), ("nonfinite", "same_failure"), ("unknown", "oom")]
)
def test_of_an_operation_alone_no_cure_is_proven(monkeypatch, wider, outcome):
    proof = proof_at(monkeypatch, Rung.OPERATION, wider=wider)
    assert (proof.verdict, proof.scope) == ("plausible", "operation")
    assert proof.reference.outcome == outcome
    assert "for want of memory" in proof_in_brackets(proof)


def test_the_rung_follows_from_what_is_left(monkeypatch):
    given, found = failing(), []
    monkeypatch.setattr(room, "most_beyond_now", lambda _: 0)
    for left in (None, 10**6, 12_000, 4_000, 10):
        monkeypatch.setattr(room, "left_on", lambda _, left=left: left)
        found.append(Ladder(given, "blocks.1.squared").rung)
    whole, parts = Rung.WHOLE, Rung.PARTS
    assert found == [whole, whole, parts, Rung.OPERATION, Rung.OPERATION]
    monkeypatch.setattr(ladder, "parts", lambda _: {})
    monkeypatch.setattr(room, "left_on", lambda _: 12_000)
    assert Ladder(given, "blocks.1.squared").rung is Rung.REGION
    assert Ladder(given, "").rung is Rung.OPERATION
    assert region_of(given.step.view.root, "head") == "head"


def short(*_, **__):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


def test_a_rung_that_memory_was_too_short_for_is_left(monkeypatch):
    from nanstop.prove.reference import exact

    monkeypatch.setattr(exact, "reference", short)
    proof = proof_at(monkeypatch, *Rung)
    assert (proof.verdict, proof.scope) == ("proven", "layer by layer")
    monkeypatch.setattr(exact, "streamed", short)
    proof = proof_at(monkeypatch, *Rung)
    assert (proof.verdict, proof.scope) == ("proven", "region blocks.1")


def test_a_run_that_memory_was_too_short_for_is_no_failure(monkeypatch):
    given = failing()
    monkeypatch.setattr(given.step, "_loss_fn", short)
    for run in (
        lambda: given.attempt(under=lambda: torch.enable_grad()),
        lambda: rerun(given.step, 0, incident="", first_loss=None),
        lambda: localize(given.step, 0),
        lambda: failing_step(given.step, phase="forward", raised=False),
    ):
        with pytest.raises(ShortOfMemoryError, match="memory is short"):
            run()


@pytest.mark.parametrize(
    ("dtype", "left", "is_begun"),
    [
        (torch.float32, 5_000, False),
        (torch.float32, 50_000, True),
        (torch.bfloat16, 5_000, False),
        (torch.bfloat16, 10_000, True),
        (None, 5_000, True),
        (None, -1, False),
    ],
)
def test_a_trial_that_has_no_room_is_not_begun(monkeypatch, dtype, left, is_begun):
    """In the formats that it has, the step, which took 10,000 bytes, has had its room; in others
    the copies of its weights lie there. What kernels want for themselves is kept free.
    """
    from dataclasses import replace

    given = replace(failing(), takes=10_000)
    monkeypatch.setattr(room, "left_on", lambda _: 2**24 + left)
    ran, original = [], given.step._loss_fn
    monkeypatch.setattr(given.step, "_loss_fn", lambda *a: ran.append(1) or original(*a))
    weights = list(given.step.view.root.parameters()) if dtype is not None else []
    with nullcontext() if is_begun else pytest.raises(ShortOfMemoryError, match="is short"):
        given.attempt(under=lambda: swapped(weights, dtype or torch.float16))
    assert bool(ran) == is_begun


def test_a_narrower_trial_may_keep_as_much_for_its_backward(monkeypatch):
    """Gradients of 6,980 bytes, 3,020 beside them: with half the gradients 6,510 in all."""
    from dataclasses import replace

    given = replace(failing(), takes=10_000)
    weights = list(given.step.view.root.float().parameters())
    monkeypatch.setattr(room, "left_on", lambda _: 2**24 + 6_000)
    with pytest.raises(ShortOfMemoryError, match="is short"):
        given.attempt(under=lambda: swapped(weights, torch.bfloat16))


def test_no_gradients_wait_beside_a_run_by_parts(monkeypatch):
    """On a card they are as large as the weights, and what is left is little more."""
    held, beside = [], []
    attempt, by_parts = FailingStep.attempt, ExactRuns._by_parts

    def kept(self, *args, **options):
        run = attempt(self, *args, **options)
        held.extend(weakref.ref(one) for one in (run.grads or {}).values())
        return run

    def alone(self, *args):
        beside.append(sum(one() is not None for one in held))
        return by_parts(self, *args)

    monkeypatch.setattr(FailingStep, "attempt", kept)
    monkeypatch.setattr(ExactRuns, "_by_parts", alone)
    assert proof_at(monkeypatch, Rung.PARTS).verdict == "proven"
    assert len(beside) >= 2
    assert not any(beside)


@pytest.mark.parametrize(("num_batches", "verdict"), [(1, "proven"), (2, "plausible")])
def test_what_is_healthy_need_not_have_room_for_a_verdict(monkeypatch, num_batches, verdict):
    """The failing micro-batch had its run by parts; how near others come to theirs is not known,
    and another of the window, which a proof is confirmed on, is held against nothing.
    """
    by_parts, num = ExactRuns._by_parts, []

    def once(self, *args):
        num.append(1)
        return by_parts(self, *args) if len(num) == 1 else None

    given = failing()
    given.step.batches = given.step.batches[:num_batches]
    place = localize(given.step, 0)
    monkeypatch.setattr(Ladder, "_has_room", lambda _, rung: rung is not Rung.WHOLE)
    monkeypatch.setattr(ExactRuns, "_by_parts", once)
    proof = prove_step(given, place.key, (ISLAND,), policy=Policy())
    assert len(num) == 2
    assert (proof.verdict, proof.scope) == (verdict, "layer by layer")
    assert "nothing in this window is healthy" in proof.reference.source


def test_a_run_that_fails_keeps_no_gradients():
    run = failing().attempt(under=lambda: torch.enable_grad())
    assert run.failed
    assert run.grads is None


def half_updates():
    """Return a net in float16, its AdamW after one update, and a step that trains it further."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, eps=1e-3, foreach=False)
    batches = [{"x": torch.randn(8, 4).half()}]
    step = FnStep(
        net, lambda net, batch: net(batch["x"]).float().square().mean(), batches, optimizer
    )
    step.run(0)
    step.update()
    optimizer.zero_grad()
    return step


def test_updates_before_one_that_is_to_come_are_made_in_float32_too():
    """The optimizer's state has the format of what it updates, or it cannot work."""
    step = half_updates()
    rewind = Rewind(Snapshot(trainable_of(step.view)), (step, step))
    given = FailingStep(
        step=step, micro=0, micros=(0,), update=True, rewind=rewind, before=(step,), pending=True
    )
    run = ExactRuns(given).of(0)
    assert run.error is None
    assert {grad.dtype for grad in run.grads.values()} == {torch.float32}


def test_no_run_by_parts_makes_updates(monkeypatch):
    """Its gradients are out of the way of every update."""
    given = half_updates()
    later = FailingStep(step=given, micro=0, micros=(0,), before=(given,), pending=True)
    monkeypatch.setattr(Ladder, "_has_room", lambda _, rung: rung is not Rung.WHOLE)
    assert Ladder(later, "0").rung is Rung.REGION


def test_an_update_is_not_tried_where_the_host_has_no_room_to_undo_it(monkeypatch):
    view = half_updates().view
    given, leaves = {"buffers": BufferNotes(view.root)}, list(view.root.parameters())
    monkeypatch.setattr(room, "left_on", lambda _: 10)
    with undone(view.root, leaves, Trainable({}), **given):
        pass
    with (
        pytest.raises(ShortOfMemoryError),
        undone(view.root, leaves, trainable_of(view), **given),
    ):
        raise AssertionError


def test_where_no_sample_can_be_tried_alone_which_is_healthy_is_not_known(monkeypatch):
    monkeypatch.setattr(bad_samples, "bad_rows", no_room)
    assert bad_samples.healthy_rows(failing()) is None


def test_what_a_float32_run_is_made_of_may_remain_unknown(monkeypatch):
    exact = ExactRuns(failing())
    exact._runs[0] = failing().attempt(under=nullcontext)
    monkeypatch.setattr(ExactRuns, "_whole", no_room)
    assert exact.still_in() == ""


def no_room(*_, **__):
    raise ShortOfMemoryError


def test_code_that_there_is_no_room_to_try_leaves_the_proof(monkeypatch):
    monkeypatch.setattr(Trials, "typed", no_room)
    monkeypatch.setattr("nanstop.prove.prove.FORMS", {"island"})
    proof = proof_at(monkeypatch, Rung.WHOLE)
    assert (proof.verdict, proof.typed) == ("proven", None)


@pytest.mark.parametrize("place", ["cpu", None])
def test_an_update_is_undone_wherever_its_copies_wait(monkeypatch, place):
    """What waits on a device with ample room is put back like any other."""
    step = half_updates()

    def held():
        state = step.view.optimizer.state
        moments = {(id(p), key): state[p][key] for p in state for key in state[p]}
        return moments | {id(p): p for p in step.view.root.parameters()}

    before = {key: value.clone() for key, value in held().items()}
    usual = attempt(half_updates(), 0, update=True)
    monkeypatch.setattr(replay_step, "place_of_copies", lambda _: place)
    run = attempt(step, 0, update=True)
    assert (run.digest, run.bad, run.error) == (usual.digest, usual.bad, None)
    after = held()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
