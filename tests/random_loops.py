"""Random training programs: small networks in every order of forwards, backwards and updates, with
one fault.

A program is run action by action, as a script would;
its outcome is everything that a script can see, as bytes.
"""

import logging
import random
import sys
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3
HIDDEN = 4


class Statistics(nn.Module):
    """Running statistics in every way that they are written:
    in place, through ``data``, replaced, as an attribute.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.zeros(HIDDEN))
        self.register_buffer("by_data", torch.zeros(HIDDEN))
        self.register_buffer("replaced", torch.zeros(HIDDEN))
        self.attribute = torch.zeros(HIDDEN)
        self.count, self.seen = 0, []

    def forward(self, x):
        mean = x.detach().mean(0)
        self.in_place.mul_(0.9).add_(mean, alpha=0.1)
        self.by_data.data.mul_(0.9).add_(mean, alpha=0.1)
        self.replaced = self.replaced * 0.9 + mean * 0.1
        self.attribute.mul_(0.9).add_(mean, alpha=0.1)
        self.count += 1
        self.seen.append(x.shape[0])
        return x * self.replaced.square().add(1) - self.in_place + self.by_data * x + self.attribute


class Teacher(nn.Module):
    """An averaged copy of a layer, which every forward moves."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
            self.teacher.bias.data = self.teacher.bias.data * 0.9 + self.student.bias.data * 0.1
        return self.student(x) * torch.sigmoid(self.teacher(x))


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


class Queue(nn.Module):
    """Remembers samples, as contrastive learning does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, HIDDEN))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        similarity = x @ self.queue.clone().t()
        self.queue[int(self.place)] = x.detach().mean(0)
        self.place[0] = (self.place[0] + 1) % 6
        return x * similarity.mean(1, keepdim=True).tanh() + x


class Hidden(nn.Module):
    """Goes on from what the last call left."""

    def __init__(self):
        super().__init__()
        self.hidden = None

    def forward(self, x):
        h = torch.tanh(x if self.hidden is None else x + self.hidden)
        self.hidden = h.detach().mean(0)
        return h


class Hooked(nn.Module):
    """Averages its gradients and inputs in hooks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.moved, self.fed = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN)
        self.inner.weight.register_hook(lambda grad: self.average(self.moved, grad))
        self.inner.register_forward_hook(
            lambda _m, given, _o: self.average(self.fed, given[0].mean(0))
        )

    def average(self, into, value):
        into.mul_(0.9).add_(value.detach(), alpha=0.1)

    def forward(self, x):
        return self.inner(x).tanh()


class Tally:
    """Counts what it is shown: no module, and no attribute of one."""

    shown_to_all = 0

    def __init__(self):
        self.shown, self.last, self.own = 0, [], random.Random(3)

    def __call__(self, _module, _given, result):
        self.shown += 1
        Tally.shown_to_all += 1
        self.last.append(float(result.detach().mean()))
        if len(self.last) > 3:
            self.last.pop(0)
        return result * (1 + 0.1 / self.shown + 0.01 * self.own.random())


def counted(module, _given, result, seen=[]):  # noqa: B006 - as scripts do it
    """A hook that remembers in a default, and in the file that it stands in."""
    seen[:] = [*seen[-2:], result.shape[0]] if module.training else []
    totals["rows"] = totals.get("rows", 0) + result.shape[0]
    return result + 1e-3 * totals["rows"] + 1e-3 * sum(seen)


totals = {}


class Remembering(nn.Module):
    """Is followed by hooks that remember, in every place where a script may."""

    def __init__(self):
        super().__init__()
        self.inner, calls = nn.Linear(HIDDEN, HIDDEN), 0
        generator, Tally.shown_to_all = np.random.default_rng(4), 0
        totals.clear()
        counted.__defaults__[0].clear()

        def annealed(_module, given):
            nonlocal calls
            calls += 1
            return (given[0] / calls + 0.01 * generator.random(),)

        self.inner.register_forward_pre_hook(annealed)
        self.inner.register_forward_hook(Tally())
        self.inner.register_forward_hook(counted)

    def forward(self, x):
        return self.inner(x).tanh() * (1 + 0.01 * Tally.shown_to_all)


class Talking(nn.Module):
    """Says what it is given, in every way that a script may."""

    def forward(self, x):
        print(f"mean {x.mean().item():.3f}")  # noqa: T201
        print(f"rows {len(x)}", file=sys.stderr)  # noqa: T201
        logging.getLogger("a.script").critical("largest %.3f", x.max().item())
        return x.tanh()


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


MIDDLES = {
    "tanh": nn.Tanh,
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.ReLU(inplace=True)),
    "instance norm": lambda: nn.BatchNorm1d(HIDDEN, momentum=None),
    "dropout": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.3)),
    "statistics": Statistics,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN)),
    "old spectral": lambda: nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN)),
    "teacher": Teacher,
    "noise": Noise,
    "queue": Queue,
    "hidden": Hidden,
    "hooked": Hooked,
    "recomputed": Recomputed,
    "remembering": Remembering,
    "talking": Talking,
}

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
}

FAULTS = ("input", "loss", "gradient", "weight", "buffer", "rate")


@dataclass(frozen=True)
class Program:
    """``actions``: a word and what it acts on.
    ``goes_on``: whether the script catches what an action raises.
    """

    middles: tuple[str, ...]
    optimizer: str
    actions: tuple[tuple, ...]
    tied: bool = False
    frozen: bool = False
    one_optimizer: bool = False
    goes_on: bool = False


_number = st.integers(0, 5)
_action = st.one_of(
    st.tuples(st.just("forward"), _number, st.sampled_from(("new", "through", "detached", "leaf"))),
    st.tuples(st.just("forward"), _number, st.just("new")),
    st.tuples(st.just("backward"), _number, st.booleans(), st.just(False)),
    st.tuples(st.just("backward"), _number, st.just(False), st.just(False)),
    st.tuples(st.just("backward"), _number, st.booleans(), st.just(True)),
    st.tuples(st.just("step"), _number),
    st.tuples(st.just("step"), _number),
    st.tuples(st.just("zero"), _number, st.booleans()),
    st.tuples(st.just("clip"), _number),
    st.tuples(st.just("sum"), _number, _number),
    st.tuples(st.just("penalty"), _number, _number),
    st.tuples(st.just("read"), _number),
)
BACKWARD, CLOSING = ("backward", -1, True, False), ("backward", -1, False, False)


def _rounds(a, b):
    """Return rounds of well-known loops over two networks (or one)."""
    new_a, new_b = ("forward", a, "new"), ("forward", b, "new")
    step_a, step_b = ("step", a), ("step", b)
    zero_a, zero_b = ("zero", a, True), ("zero", b, True)
    updates = (step_a, step_b, zero_a, zero_b)
    accumulated = (new_a, CLOSING, new_a, CLOSING)
    generator = (zero_a, ("forward", b, "earlier"), CLOSING, step_a)
    return {
        "plain": [zero_a, new_a, CLOSING, step_a],
        "accumulated": [*accumulated, ("clip", a), step_a, ("zero", a, False)],
        "adversarial": [new_a, zero_b, ("forward", b, "detached"), CLOSING, step_b, *generator],
        "two losses": [new_a, new_b, ("backward", -2, False, False), CLOSING, *updates],
        "retained": [new_a, BACKWARD, ("sum", -1, -1), CLOSING, step_a, zero_a],
        "penalty": [("forward", a, "leaf"), ("penalty", -1, a), CLOSING, step_a, zero_a],
        "twice": [
            *(zero_a, new_a, ("backward", -1, True, True)),
            *(("penalty", -1, a), CLOSING, step_a),
        ],
        "encoder": [new_a, ("forward", b, "through"), CLOSING, *updates],
    }


_KINDS = sorted(_rounds(0, 0))
_round = st.one_of(
    st.tuples(st.sampled_from(_KINDS), st.integers(0, 2), st.integers(0, 2)).map(
        lambda n: _rounds(n[1], n[2])[n[0]]
    ),
    st.tuples(st.sampled_from(_KINDS), st.integers(0, 2), st.integers(0, 2)).map(
        lambda n: _rounds(n[1], n[2])[n[0]]
    ),
    st.lists(_action, min_size=1, max_size=4),
)
_BEFORE = {"input": "forward", "loss": "forward", "gradient": "step", "rate": "step"}


def _places(actions, kind):
    """Return where a fault of this kind can strike."""
    wanted = _BEFORE.get(kind)
    places = [i for i, action in enumerate(actions) if wanted in (None, action[0])]
    return places or [len(actions)]


@st.composite
def programs(draw):
    """A program of some rounds, with a fault in nineteen of twenty."""
    rounds = draw(st.lists(_round, min_size=2, max_size=5))
    actions = [action for one in rounds for action in one]
    if draw(st.integers(0, 19)):
        kind = draw(st.sampled_from(("input", "loss", *FAULTS)))
        fault = "spoil", kind, draw(st.sampled_from(("nan", "inf", "-inf"))), draw(_number)
        actions.insert(draw(st.sampled_from(_places(actions, kind))), fault)
    return Program(
        middles=tuple(draw(st.lists(st.sampled_from(sorted(MIDDLES)), min_size=1, max_size=3))),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        actions=tuple(actions),
        tied=draw(st.booleans()),
        frozen=draw(st.booleans()),
        one_optimizer=draw(st.booleans()),
        goes_on=draw(st.booleans()),
    )


@dataclass
class Outcome:
    """What a run left: bytes by name, and what was raised by place."""

    values: dict = field(default_factory=dict)
    raised: dict = field(default_factory=dict)

    def note(self, name, value):
        if isinstance(value, torch.Tensor):
            dense = value.detach().contiguous()
            held = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
            value = tuple(value.shape), str(value.dtype), held, value._version
        self.values[name] = value

    def differences(self, other):
        """Return names of what is not the same bit for bit."""
        names = self.values.keys() | other.values.keys()
        found = sorted(n for n in names if self.values.get(n) != other.values.get(n))
        if self.raised != other.raised:
            found.append(f"raised {self.raised} {other.raised}")
        return found


class Loop:
    """One run of a program."""

    def __init__(self, program):
        torch.manual_seed(0)
        random.seed(0)
        self.program = program
        self.nets = [
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), MIDDLES[name](), nn.Linear(HIDDEN, WIDTH))
            for name in program.middles
        ]
        if program.tied:
            for net in self.nets[1:]:
                net[2].weight = self.nets[0][2].weight
        if program.frozen:
            self.nets[-1][0].requires_grad_(False)
        make = OPTIMIZERS[program.optimizer]
        groups = [self.nets] if program.one_optimizer else [[net] for net in self.nets]
        self.optimizers = [
            make(list({id(p): p for n in nets for p in n.parameters()}.values())) for nets in groups
        ]
        self.losses, self.outputs, self.inputs = [], [], []
        self.bad = None
        self.outcome = Outcome()

    def run(self):
        """Return the outcome. What an action raises is part of it, and ends the program unless
        it goes on.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph")
            for place in range(len(self.program.actions)):
                self.act(place)
                if self.outcome.raised and not self.program.goes_on:
                    break
        self.look()
        return self.outcome

    def act(self, place):
        word, *given = self.program.actions[place]
        try:
            getattr(self, word)(*given)
        except Exception as error:
            self.outcome.raised[place] = type(error).__name__, str(error)

    def of(self, things, number):
        return things[number if number < 0 else number % len(things)]

    def poisoned(self, tensor, kind):
        """Return the tensor, bad where the next fault is of this kind."""
        if self.bad is None or self.bad[0] != kind:
            return tensor
        value, self.bad = self.bad[1], None
        spoil = torch.zeros_like(tensor)
        spoil.reshape(-1)[0] = value
        return tensor + spoil

    def forward(self, number, kind):
        net = self.of(self.nets, number)
        x = torch.randn(4, WIDTH)
        if kind in ("through", "detached") and self.outputs:
            x = self.outputs[-1] if kind == "through" else self.outputs[-1].detach()
        elif kind == "earlier" and len(self.outputs) > 1:
            x = self.outputs[-2]
        x = self.poisoned(x, "input")
        if kind == "leaf":
            x = x.detach().requires_grad_()
            self.inputs.append(x)
        output = net(x)
        self.outputs.append(output)
        self.losses.append(self.poisoned(output.square().mean() + output.mean(), "loss"))

    def backward(self, number, retain, create):
        if self.losses:
            self.of(self.losses, number).backward(retain_graph=retain or None, create_graph=create)

    def sum(self, first, second):
        if self.losses:
            self.losses.append(self.of(self.losses, first) + self.of(self.losses, second))

    def penalty(self, number, net):
        if self.losses:
            loss, net = self.of(self.losses, number), self.of(self.nets, net)
            trained = [p for p in net.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
            self.losses.append(sum((g.square().sum() for g in grads if g is not None), loss * 0))

    def step(self, number):
        optimizer = self.of(self.optimizers, number)
        rate = optimizer.param_groups[0]["lr"]
        if self.bad is not None and self.bad[0] == "rate":
            optimizer.param_groups[0]["lr"], self.bad = abs(self.bad[1]), None
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate

    def zero(self, number, to_none):
        self.of(self.optimizers, number).zero_grad(set_to_none=to_none)

    def clip(self, number):
        parameters = self.of(self.optimizers, number).param_groups[0]["params"]
        self.outcome.note(
            f"norm {len(self.outcome.values)}", torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        )

    def read(self, number):
        if self.losses:
            self.outcome.note(f"read {len(self.outcome.values)}", self.of(self.losses, number))

    def spoil(self, kind, value, number):
        """Let something be bad: the next input or loss, or what is there now."""
        net = self.of(self.nets, number)
        if kind in ("input", "loss", "rate"):
            self.bad = kind, float(value)
            return
        if kind == "gradient":
            tensors = [p.grad for p in net.parameters()]
        else:
            tensors = net.parameters() if kind == "weight" else net.buffers()
        floats = [t for t in tensors if t is not None and t.is_floating_point()]
        if floats:
            with torch.no_grad():
                self.of(floats, number).detach().reshape(-1)[0] = float(value)

    def look(self):
        """Note everything that the script can see."""
        note = self.outcome.note
        for place, net in enumerate(self.nets):
            for name, tensor in (*net.named_parameters(), *net.named_buffers()):
                note(f"{place}.{name}", tensor)
                note(f"{place}.{name}.grad", tensor.grad)
            for name, module in net.named_modules():
                for key, value in vars(module).items():
                    if not key.startswith("_"):
                        seen = value.get_state() if isinstance(value, torch.Generator) else value
                        kept = seen if isinstance(seen, (torch.Tensor, int)) else repr(seen)
                        note(f"{place}.{name}.{key}", kept)
        for place, optimizer in enumerate(self.optimizers):
            for number, state in enumerate(optimizer.state.values()):
                for key, value in state.items():
                    note(f"optimizer {place}.{number}.{key}", value)
        for place, tensor in enumerate(self.inputs):
            note(f"input {place}", tensor.grad)
        for place, loss in enumerate(self.losses):
            note(f"loss {place}", loss)
        note("rng", torch.get_rng_state())
        note("random", random.getstate())
