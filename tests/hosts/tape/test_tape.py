"""The tape: what it holds, what it plays again, what it says it cannot."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from nanstop.errors import NanstopError
from nanstop.hosts.tape.left_behind import LeftBehind
from nanstop.hosts.tape.tape import MAX_CALLS, Tape
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.replay.rng import note_rng, restore_rng
from versions import needs_columns


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def taped(net, rows, loss_of, *, on_error=lambda _: None):
    """A micro-batch recorded as a loop makes it: model call, the loss outside it, backward."""
    micro = TapedMicro(Tape("cpu", on_error), note_rng())
    out = micro.tape.call(net, (rows,), {}, rng=micro.rng)
    assert micro.tape.start()
    try:
        loss = loss_of(out)
    finally:
        micro.tape.stop()
    micro.tape.call(torch.Tensor.backward, (loss,), {}, keep=True)
    micro.closed([loss])
    return micro


def replayed(net, micro, batch=None):
    """Loss and gradients of a replay, from zero gradients."""
    net.zero_grad()
    restore_rng(micro.rng)
    loss = micro.rerun(batch)
    return loss, [p.grad.clone() for p in net.parameters()]


def losses():
    weight = torch.arange(4.0)

    def masked(out):
        out = out * 1.0
        out[:, 0] = 0.0
        out[out < 0] *= 0.5
        return out.square().mean()

    def split(out):
        first, second = out.chunk(2, dim=1)
        return torch.stack([first.mean(), second.square().mean()]).sum()

    def accumulated(out):
        total = 0
        for column in out.unbind(1):
            total += column.abs().mean()
        return total

    def drawn(out):
        return nn.functional.dropout(out, 0.5).square().sum()

    def with_autocast(out):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (out @ out.T).float().mean()

    def module(out):
        return nn.CrossEntropyLoss()(out, torch.tensor([0, 1, 2]))

    return {
        "weighted": lambda out: (out * weight).sum(),
        "masked in place": masked,
        "split": split,
        "accumulated": accumulated,
        "drawn": drawn,
        "autocast": with_autocast,
        "module": module,
        "einsum": lambda out: torch.einsum("ij,kj->", out, out),
    }


def assert_replays(net, micro):
    expected = [p.grad.clone() for p in net.parameters()]
    assert micro.obstacle() == ""
    loss, gradients = replayed(net, micro)
    assert torch.equal(loss, micro.loss)
    assert all(map(torch.equal, expected, gradients))


@pytest.mark.parametrize("name", losses())
def test_a_replay_is_bitwise(net, name):
    rows = torch.randn(3, 4)
    micro = taped(net, rows, losses()[name])
    assert_replays(net, micro)


@pytest.mark.parametrize("is_view", [False, True])
def test_what_the_script_writes_over_later_is_played_as_it_was(net, is_view):
    buffer = torch.randn(3, 4)
    rows, target = buffer[:2] if is_view else buffer, torch.ones(4)

    micro = taped(net, rows, lambda out: (out * target).square().sum())
    later = Tape("cpu", lambda _: None)
    later.on_write = micro.tape.keep
    assert later.start()
    target.fill_(7.0)
    buffer.mul_(0.5)
    buffer[0] = 3.0
    later.stop()
    assert_replays(net, micro)
    assert torch.equal(target, torch.full((4,), 7.0))


def test_gradients_set_to_none_between_forward_and_backward_are_no_ops_not_of_the_model(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)

    def loss_of(out):
        optimizer.zero_grad()
        return out.square().sum()

    micro = taped(net, torch.randn(3, 4), loss_of)
    assert micro.tape.num_ops == 2


def test_results_are_not_held(net):
    kept = []

    def loss_of(out):
        hidden = out * 2.0
        kept.append(weakref.ref(hidden))
        return hidden.sum()

    micro = taped(net, torch.randn(3, 4), loss_of)
    gc.collect()
    assert kept[0]() is None
    assert micro.obstacle() == ""


def test_what_the_loss_does_not_need_is_left_out(net):
    total = torch.zeros(())

    def loss_of(out):
        loss = out.square().mean()
        total.add_(loss.detach())
        return loss

    micro = taped(net, torch.randn(3, 4), loss_of)
    before = total.clone()
    replayed(net, micro)
    assert micro.obstacle() == ""
    assert torch.equal(total, before)


def test_a_batch_can_be_replaced_in_model_and_loss(net):
    rows, target = torch.randn(3, 4), torch.randn(3, 4)
    micro = taped(net, rows, lambda out: (out - target).square().sum())
    assert set(micro.batch) == {"input", "target"}
    fewer = {name: value[:2] for name, value in micro.batch.items()}
    loss, _ = replayed(net, micro, fewer)
    restore_rng(micro.rng)
    assert torch.equal(loss, (net(rows[:2]) - target[:2]).square().sum().detach())


def test_keywords_and_containers_are_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, batch, extra=None):
            return (batch["ids"] + batch["mask"]).sum() * self.scale + extra[0].sum()

    two = Two()
    micro = TapedMicro(Tape("cpu", lambda _: None), note_rng())
    batch = {"ids": torch.ones(2), "mask": torch.zeros(2)}
    loss = micro.tape.call(two, (batch,), {"extra": [torch.ones(2)]}, rng=micro.rng)
    micro.tape.call(torch.Tensor.backward, (loss,), {}, keep=True)
    micro.closed([loss])
    assert set(micro.batch) == {"ids", "mask", "extra.0"}
    assert torch.equal(replayed(two, micro)[0], torch.tensor(4.0))


@pytest.mark.parametrize("which", [0, 1])
def test_inputs_changed_afterwards_are_an_obstacle(net, which):
    rows, target = torch.randn(3, 4), torch.randn(3, 4)
    micro = taped(net, rows, lambda out: (out - target).sum())
    assert micro.obstacle() == ""
    (rows, target)[which].zero_()
    assert "an input was changed in place" in micro.obstacle()


def test_a_loss_with_a_history_of_its_own_is_an_obstacle(net):
    other = nn.Linear(4, 4)(torch.randn(3, 4))
    micro = taped(net, torch.randn(3, 4), lambda out: (out + other).sum())
    assert "were not recorded" in micro.obstacle()


def test_what_the_loss_makes_of_the_scripts_own_tensors_is_played_again(net):
    rewards, temperature = torch.tensor([1.0, 2.0, 4.0]), nn.Parameter(torch.tensor(0.5))

    def loss_of(out):
        advantages = (rewards - rewards.mean()) / rewards.std()
        return (out.mean(1) * advantages * temperature.exp()).sum()

    micro = taped(net, torch.randn(3, 4), loss_of)
    assert micro.obstacle() == ""
    assert set(micro.batch) == {"input", "rewards"}
    loss, _ = replayed(net, micro)
    assert torch.equal(loss, micro.loss)
    other, _ = replayed(net, micro, {**micro.batch, "rewards": torch.tensor([4.0, 2.0, 1.0])})
    assert not torch.equal(loss, other)


def test_asking_for_names_keeps_nothing_alive(net):
    def step():
        hidden = torch.randn(3, 4)
        held = weakref.ref(hidden)
        micro = taped(net, hidden, lambda out: out.sum())
        assert set(micro.batch) == {"input"}
        del micro, hidden
        gc.collect()
        assert held() is None

    step()


def test_what_the_script_prepares_in_place_is_taken_as_it_was_used(net):
    rows, labels = torch.randn(3, 4), torch.tensor([[5, 0, 1], [5, 1, 1], [5, 2, 0]])

    def loss_of(out):
        target = labels[:, 1:]
        padded = target == 0
        target[padded] = -100
        last = target[:, 0].clone()
        last.clamp_(min=0)
        return nn.functional.cross_entropy(out, last) * (~padded).sum()

    micro = taped(net, rows, loss_of)
    before = labels.clone()
    assert micro.obstacle() == ""
    loss, _ = replayed(net, micro)
    assert torch.equal(loss, micro.loss)
    assert torch.equal(labels, before)


def test_numbers_that_the_loss_draws_are_held(net):
    scale = torch.arange(4.0)

    def loss_of(out):
        noise = torch.rand(4)
        return (out * (noise + torch.rand_like(scale))).sum()

    micro = taped(net, torch.randn(3, 4), loss_of)
    loss, _ = replayed(net, micro)
    assert torch.equal(loss, micro.loss)


def test_large_tensors_from_outside_are_not_held(net):
    large = [torch.randn(600, 600)]
    held = weakref.ref(large[0])

    def loss_of(out):
        return out.sum() * large.pop().softmax(-1).mean()

    micro = taped(net, torch.randn(3, 4), loss_of)
    gc.collect()
    assert held() is None
    assert micro.obstacle() == ""


def test_a_tensor_from_outside_that_the_loss_writes_is_a_copy_when_it_is_played(net):
    state = torch.zeros(4)

    def loss_of(out):
        state.add_(out.detach().mean(0))
        return (out * state).sum()

    micro = taped(net, torch.randn(3, 4), loss_of)
    left = state.clone()
    assert_replays(net, micro)
    assert torch.equal(state, left)


def test_an_op_that_raises_is_told_and_raises_again_when_played(net):
    told = []
    tape = Tape("cpu", told.append)
    out = tape.call(net, (torch.randn(3, 4),), {}, rng=note_rng())
    tape.start()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        out @ torch.ones(7, 7)
    tape.stop()
    assert len(told) == 1
    micro = TapedMicro(tape, note_rng())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        micro.rerun(None)


def test_a_tape_is_given_up_when_it_is_too_long(net):
    def loss_of(out):
        for _ in range(MAX_CALLS):
            out = out + 0.0
        return out.sum()

    assert "calls before backward" in taped(net, torch.randn(3, 4), loss_of).obstacle()


def test_the_stack_of_function_modes_is_left_as_it_was(net):
    tape = Tape("cpu", lambda _: None)
    with torch.device("cpu"):
        assert not tape.start()
    assert tape.start()
    with torch.device("cpu"):
        assert tape.stop()
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0
    assert not tape.stop()


def test_ops_are_played_from_the_scripts_own_line(net):
    lines = []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            import sys

            frame = sys._getframe(1)
            while frame is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            lines.append((frame.f_code.co_filename, frame.f_lineno, str(func)))
            return func(*args, **(kwargs or {}))

    def loss_of(out):
        return out.cosh().sum()

    micro = taped(net, torch.randn(3, 4), loss_of)
    with Noting():
        replayed(net, micro)
    wanted = (__file__, loss_of.__code__.co_firstlineno + 1)
    assert [(f, n) for f, n, op in lines if op == "aten.cosh.default"] == [wanted]


def early(net, prepared, rows, loss_of):
    """A micro-batch whose tape has begun before the model call."""
    tape = Tape("cpu", lambda _: None)
    assert tape.start()
    made = prepared()
    tape.stop()
    micro = TapedMicro(tape, note_rng())
    out = tape.call(net, (rows(made),), {}, rng=micro.rng)
    assert tape.start()
    loss = loss_of(out, made)
    tape.stop()
    tape.call(torch.Tensor.backward, (loss,), {}, keep=True)
    micro.closed([loss])
    return micro


def test_what_was_made_before_the_model_call_is_taken_as_it_is(net):
    data = torch.randn(9, 4)
    micro = early(net, lambda: data[3:6], lambda rows: rows, lambda out, _: out.sum())
    assert micro.obstacle() == ""
    assert {name: tuple(value.shape) for name, value in micro.batch.items()} == {"input": (3, 4)}
    assert len(micro.tape.needed()) == 3
    assert torch.equal(replayed(net, micro)[0], micro.loss)


@needs_columns
def test_what_was_made_before_the_model_call_and_is_not_finite_is_made_again(net):
    rewards, inputs = torch.tensor([[2.0], [3.0], [4.0]]), torch.randn(3, 4)

    def prepared():
        return (rewards - rewards.mean(1, keepdim=True)) / (rewards - rewards).norm(dim=1)[:, None]

    micro = early(net, prepared, lambda _: inputs, lambda out, advantages: (out * advantages).sum())
    assert micro.obstacle() == ""
    assert set(micro.batch) == {"input", "rewards"}
    fixed, _ = replayed(net, micro, {**micro.batch, "rewards": rewards})
    assert fixed.isnan()
    rewards += 0.0
    assert set(micro.batch) == {"input", "advantages"}, "what it was made of is no longer there"
    assert micro.obstacle() == ""


def test_gradients_that_a_script_empties_itself_are_no_ops_before_the_model_call(net):
    tape = Tape("cpu", lambda _: None)
    assert tape.start()
    for parameter in net.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = None
    tape.stop()
    assert (tape.num_outer, tape.num_passed) == (2, 6), "two tensors of zeros are made"
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_parameter_of_the_script_that_is_used_before_the_model_call_has_its_gradient(net):
    scale = nn.Parameter(torch.tensor(0.5))
    inputs = torch.randn(3, 4)
    micro = early(net, lambda: scale.exp(), lambda _: inputs, lambda out, s: (out * s).sum())
    expected, scale.grad = scale.grad.clone(), None
    assert micro.obstacle() == ""
    replayed(net, micro)
    assert torch.equal(scale.grad, expected)


class Router(nn.Module):
    def __init__(self, *, is_made_once=False):
        super().__init__()
        self.inner, self.aux, self.is_made_once = nn.Linear(4, 4), None, is_made_once
        self.all = []

    def forward(self, x):
        out = self.inner(x)
        if self.aux is None or not self.is_made_once:
            self.aux = out.square().mean()
        self.all.clear()
        self.all += [out.exp().sum(), out.sin().sum()]
        return out


def with_aux(net, left, num_micros=3):
    """Micro-batches whose loss reads what the model leaves in an attribute."""
    for _ in range(num_micros):
        micro = TapedMicro(Tape("cpu", lambda _: None), note_rng())
        micro.tape.left = left
        out = micro.tape.call(net, (torch.randn(2, 4),), {}, rng=micro.rng)
        micro.tape.start()
        try:
            loss = out.abs().mean() + 0.1 * net[0].aux + net[0].all[1]
        finally:
            micro.tape.stop()
        micro.tape.call(torch.Tensor.backward, (loss,), {"retain_graph": True}, keep=True)
        micro.closed([loss])
        yield micro


def test_what_a_model_leaves_in_an_attribute_is_part_not_of_the_model():
    net = nn.Sequential(Router())
    for micro in with_aux(net, LeftBehind(num_searches=1)):
        aux, every = net[0].aux, [*net[0].all]
        assert_replays(net, micro)
        assert net[0].aux is aux
        assert all(one is other for one, other in zip(net[0].all, every, strict=True))
        net.zero_grad()


def test_what_was_left_before_is_not_made_anew():
    net = nn.Sequential(Router(is_made_once=True))
    *_, micro = with_aux(net, LeftBehind(num_searches=1))
    with pytest.raises(NanstopError, match="leaves no `aux`"):
        micro.rerun(None)


def test_models_are_not_searched_again_and_again():
    net, left = nn.Sequential(Router()), LeftBehind(num_searches=2)
    other = torch.ones((), requires_grad=True).exp()
    (micro,) = with_aux(net, left, num_micros=1)
    walks = []
    net.modules = lambda: walks.append(1) or iter(())
    for _ in range(5):
        assert left.stand_in(other, micro.tape) is None
    assert len(walks) == 2


def test_a_list_that_grows_for_ever_is_not_followed_for_ever():
    net, left = nn.Sequential(Router()), LeftBehind(num_searches=2)
    (micro,) = with_aux(net, left, num_micros=1)
    net[0].all = [torch.ones((), requires_grad=True).exp() for _ in range(600)]
    found = [left.stand_in(one, micro.tape) for one in net[0].all]
    assert 200 < sum(one is not None for one in found) <= 256


def test_a_large_tensor_that_is_read_again_and_again_leaves_room_for_the_loss(net):
    images, boxes = torch.randn(300, 64, 256), torch.randn(2, 4)

    def loss_of(out):
        for number in range(20):  # as a data set does that lies in memory
            images[number]
        sides = boxes[:, 2:] - boxes[:, :2]
        return (out[:, 0] - sides[:, 0] / sides[:, 1]).square().mean()

    micro = taped(net, torch.randn(2, 4), loss_of)
    assert "div" in {call.function.__name__ for call in micro.tape.needed() if call.outer}


@pytest.mark.parametrize("is_known", [True, False])
def test_a_write_looks_at_what_was_given_of_that_tensor_alone(is_known):
    """A data set fills a row of each sample: it cost as much again for each call so far."""
    tape, rows, events = Tape("cpu", lambda _: None), [torch.ones(4) for _ in range(400)], []
    written = rows[0] if is_known else torch.ones(4)

    def note(_, event, __):
        events.extend([event] if event == "call" else [])

    assert tape.start()
    try:
        sums = [row.sum() for row in rows]
        sys.setprofile(note)
        try:
            written[:2] = 0.0
        finally:
            sys.setprofile(None)
    finally:
        tape.stop()
    assert len(sums) == len(tape.calls) == len(rows)
    assert len(events) < 100
    given = tape.calls[0].args[0].tensor
    assert given.tolist() == [1.0] * 4
    assert (given is written) is False


def test_what_a_call_was_given_that_was_not_kept_is_let_go():
    tape, tensor = Tape("cpu", lambda _: None), torch.ones(4)
    reference = weakref.ref(tensor)
    assert tape.start()
    try:
        for _ in range(3):
            tensor.fill_(2.0)
            tensor.tolist()
    finally:
        tape.stop()
    del tensor
    gc.collect()
    assert not tape.calls
    assert reference() is None


@pytest.mark.parametrize(
    "loss_of", [lambda out: (out**2).mean(), lambda out: out.pow(2).mean() + (1 - out).sum()]
)
def test_a_power_calls_nothing_of_the_script(net, loss_of):
    """Torch wraps what C has made of it, as a transform does a function of the script's own."""
    assert not taped(net, torch.randn(3, 4), loss_of).calls_script


class CountedCalls(list):
    """Counts how often somebody goes through all of them."""

    num_walks = 0

    def __iter__(self):
        self.num_walks += 1
        return super().__iter__()


def test_a_long_tape_is_not_gone_through_for_each_tensor_with_a_graph(net):
    others = [torch.ones(3, requires_grad=True) * 2 for _ in range(40)]
    for called in (False, True):
        tape = Tape("cpu", lambda _: None, left=LeftBehind(num_searches=8))
        if called:
            tape.call(net, (torch.randn(2, 4),), {}, rng=note_rng())
        tape.calls = CountedCalls(tape.calls)
        assert tape.start()
        for other in others:
            other.sum()
        tape.stop()
        assert tape.calls.num_walks <= 8


def test_what_is_asked_of_a_shape_is_no_call(net):
    tape = Tape("cpu", lambda _: None)
    rows = tape.call(net, (torch.ones(3, 4),), {}, rng=note_rng())
    assert tape.start()
    assert (rows.size(-1), rows.dim(), rows.shape[0], rows.dtype) == (4, 2, 3, torch.float32)
    tape.stop()
    assert tape.num_ops == 0
    assert tape.num_passed == 4
