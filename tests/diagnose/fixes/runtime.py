"""The fixes of 6xx: kernels, memory, ranks."""

import json
import math
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.gradients import bytes_of_adam
from diagnose.fixes.kinds import Fixes, close
from diagnose.fixes.setup_formats import EIGHT_BIT, lora, loss_of
from nanstop.faults.specimen import run_plain
from nanstop.faults.table import ZOO

FIXES = Fixes()


# NS601 to NS603 - processes, kernels, chance
FIXES.test("NS601", 1, "e2e/test_supervised.py::test_the_run_after_a_death_names_the_operation")
FIXES.say("NS601", 2, "another version of a library")
FIXES.test(
    "NS601",
    3,
    "commands/bisect/test_bisect.py::test_a_signal_is_bisected_to_the_keys_that_cause_it",
)
FIXES.say("NS601", 4, "a kernel that kills is of one machine")


@FIXES.plant("NS602", 1)
def another_kernel(fixed):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    specimen = ZOO["NS602"].fault()
    with sdpa_kernel(SDPBackend.MATH) if fixed else nullcontext():
        run = run_plain(specimen)
    exact = specimen.model.double()(specimen.batches[0]["x"].double()).square().mean()
    return run.healthy and math.isclose(run.losses[0], exact.item(), rel_tol=1e-3)


FIXES.say("NS602", 2, "the kernel of a half format that fails alone is of one machine")
FIXES.say("NS602", 3, "a compiler's defect is of one version")


@FIXES.plant("NS602", 4)
def a_backward_that_hears(fixed):
    """Whether a loss that is weighted has the gradient that plain operations have."""

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, given):
            (x,) = ctx.saved_tensors
            return 2 * x * given if fixed else 2 * x

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (torch.tensor([0.0, 1.0, 0.5]) * Squares.apply(x)).sum().backward()
    return close(x.grad, torch.tensor([0.0, 4.0, 3.0]))


FIXES.test(
    "NS603",
    1,
    "commands/compare/test_compare.py::test_healthy_runs_are_told_apart_by_the_first_layer_that_parts",
)


@FIXES.plant("NS603", 2)
def memory_that_always_holds_nan(fixed):
    """Whether a read of memory that nobody wrote fails each time."""
    torch.use_deterministic_algorithms(fixed)
    seen = []
    for _ in range(20):
        torch.zeros(4096)  # what the allocator hands out next
        seen.append(bool(torch.empty(4096).isnan().all()))
    torch.use_deterministic_algorithms(False)
    return all(seen)


FIXES.say("NS603", 3, "streams and graphs of a GPU")
FIXES.say("NS603", 4, "a look at a system's log")
FIXES.say("NS603", 5, "a test of a GPU")


# NS604 - memory
def kept_bytes(run):
    """The largest tensor that a forward keeps for its backward, and all together."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    return max(sizes.values()), sum(sizes.values()), loss


@FIXES.plant("NS604", 1)
def smaller_batches_and_more_of_them(fixed):
    """Half the memory of a forward, and the same gradient where the window's tokens divide."""
    rows = torch.randint(3, 64, (8, 8))
    model, whole = tiny.llama(), tiny.llama()
    parts = rows.chunk(4 if fixed else 1)
    count = torch.tensor(rows.numel() - len(rows))
    kept = []
    for part in parts:
        _, size, loss = kept_bytes(
            lambda p=part: model(input_ids=p, labels=p, num_items_in_batch=count).loss
        )
        kept.append(size)
        loss.backward()
    _, most, loss = kept_bytes(lambda: whole(input_ids=rows, labels=rows).loss)
    loss.backward()
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert all(map(close, *([p.grad for p in m.parameters()] for m in (model, whole))))
    return max(kept) - weights < (most - weights) / 2


@FIXES.plant("NS604", 2)
def activations_are_computed_again(fixed):
    model, plain = tiny.llama().train(), tiny.llama().train()
    if fixed:
        tiny.recompute(model, reentrant=False)
    rows = torch.randint(3, 64, (8, 16))
    _, size, loss = kept_bytes(lambda: model(input_ids=rows, labels=rows).loss)
    loss.backward()
    _, most, loss = kept_bytes(lambda: plain(input_ids=rows, labels=rows).loss)
    loss.backward()
    same = map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, plain)))
    return all(same) and size < 0.7 * most


@FIXES.cost("NS604", 2)
def one_forward_of_three_more():
    """A step is a forward and two of its size back; each layer is run once more: 4 for 3."""
    model, runs = tiny.llama().train(), []
    tiny.recompute(model, reentrant=False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
    loss_of(model).backward()
    return len(runs) == 2 * len(model.model.layers)


@FIXES.plant("NS604", 3)
def logits_in_parts(fixed):
    """The loss of 64 tokens by parts of 8, each recomputed: no tensor holds all logits."""
    torch.manual_seed(0)
    states, head = torch.randn(64, 8, requires_grad=True), nn.Linear(8, 512)
    labels = torch.randint(0, 512, (64,))

    def loss(size):
        part = lambda h, y: F.cross_entropy(head(h), y, reduction="sum")  # noqa: E731
        parts = zip(states.split(size), labels.split(size), strict=True)
        again = torch.utils.checkpoint.checkpoint
        return sum(again(part, h, y, use_reentrant=False) for h, y in parts) / 64

    whole = F.cross_entropy(head(states), labels)
    (right,) = torch.autograd.grad(whole, states)
    made = loss(8) if fixed else None
    largest, _, value = kept_bytes(
        lambda: loss(8) if fixed else F.cross_entropy(head(states), labels)
    )
    (gradient,) = torch.autograd.grad(value, states)
    assert made is None or close(made, whole)
    return close(gradient, right) and largest < 64 * 512 * 4


@FIXES.plant("NS604", 3)
def shorter_rows(fixed):
    rows = torch.randint(3, 64, (2, 16 if fixed else 64))
    _, size, _ = kept_bytes(lambda: loss_of_rows(tiny.llama(), rows))
    _, most, _ = kept_bytes(lambda: loss_of_rows(tiny.llama(), rows.new_full((2, 64), 3)))
    return size < most


def loss_of_rows(model, rows):
    return model(input_ids=rows, labels=rows).loss


@FIXES.plant("NS604", 4)
@EIGHT_BIT
def fewer_bytes_of_state(fixed):
    """Adam's 8 bytes a parameter: of adapters alone, or 2 with an 8-bit state."""
    import bitsandbytes as bnb

    model = lora(tiny.llama()) if fixed else tiny.llama()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert bytes_of_adam(torch.float32) == 16
    weight = nn.Parameter(torch.zeros(8192))
    optimizer = (bnb.optim.AdamW8bit if fixed else torch.optim.AdamW)([weight])
    weight.grad = torch.ones(8192)
    optimizer.step()
    state = optimizer.state[weight].values()
    size = sum(
        s.numel() * s.element_size() for s in state if torch.is_tensor(s) and s.numel() == 8192
    )
    return size == 2 * 8192 and trained < 0.05 * sum(p.numel() for p in model.parameters())


FIXES.say("NS604", 5, "the allocator of a GPU")


# NS605 to NS607 - ranks
FIXES.test("NS605", 1, "e2e/test_supervised.py::test_a_hang_is_ended_with_its_stacks")


@FIXES.plant("NS605", 2)
def as_many_batches_on_every_rank(fixed):
    """Ten rows in batches of two on three ranks."""
    from torch.utils.data import DataLoader, Subset
    from torch.utils.data.distributed import DistributedSampler

    rows, numbers = list(range(10)), []
    for rank in range(3):
        if fixed:
            sampler = DistributedSampler(rows, num_replicas=3, rank=rank, drop_last=True)
            loader = DataLoader(rows, batch_size=2, sampler=sampler, drop_last=True)
        else:
            loader = DataLoader(Subset(rows, range(rank, 10, 3)), batch_size=3)
        numbers.append(len(loader))
    return len(set(numbers)) == 1


@FIXES.cost("NS605", 2)
def a_few_samples():
    from torch.utils.data.distributed import DistributedSampler

    kept = [len(DistributedSampler(range(10), 3, rank, drop_last=True)) for rank in range(3)]
    return sum(kept) == 9


FIXES.say("NS605", 3, "a worker that hangs by chance of a fork")
FIXES.say("NS605", 4, "waiting")
FIXES.say("NS606", 1, "reading reports")
FIXES.twin("NS606", 2)
FIXES.twin("NS606", 3)
FIXES.say("NS606", 4, "another version of a library")
FIXES.twin("NS607", 1)


@cache
def copies_on_two_ranks():
    """Whether they are the same, without and with each fix, by its number."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("two_ranks.py")
        done = subprocess.run(
            [sys.executable, str(script), f"{folder}/store"],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
    return {int(number): pair for number, pair in json.loads(done.stdout).items()}


for number in (2, 3, 4, 5, 6):
    FIXES.named_plant(
        "NS607", number, "two ranks", lambda fixed, n=number: copies_on_two_ranks()[n][fixed]
    )
