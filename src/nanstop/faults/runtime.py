"""Kernels, processes, memory and threads that fail under a sound model."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from nanstop.faults.parts import Model, diagonal, ones, trained
from nanstop.faults.specimen import (
    Batch,
    Entry,
    Specimen,
    gradient_fails,
    loss_fails,
    pair,
    run_plain,
)


def child_process(ending: str, limit: float = 20.0) -> Specimen:
    """The loss waits for a child process that runs the Python text ``ending``;
    a child that dies or hangs is an error.

    This process is spared what happens to the child.
    """
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        try:
            code = subprocess.run(
                [sys.executable, "-S", "-c", ending], timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the child stood still for {limit:g} s") from None
        if code < 0:
            raise RuntimeError(f"the child was killed by {signal.Signals(-code).name}")
        return model(batch["x"]).pow(2).mean()

    return trained(model, loss_fn)


def child_is_killed(specimen: Specimen) -> bool:
    """Return whether a process is killed by SIGFPE."""
    return run_plain(specimen).error.endswith("killed by SIGFPE")


class FusedAttention(nn.Module):
    """One head of ``scaled_dot_product_attention`` over queries and keys of ``scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.query = diagonal(scale)
        self.key = diagonal(scale)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in (self.query(x), self.key(x), x))
        return nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)


def fused_attention(scale: float) -> Specimen:
    """Fused attention scales the scores after the product, plain attention before it.

    Eight products of 7e18 squared are 3.9e38, beyond float32;
    after the scale of 1 / sqrt(8) they are 1.4e38.
    """
    model = Model(attention=FusedAttention(scale))
    return trained(model, batches=({"x": ones(rising=0.01)},), lr=0.0)


def flaky(num_failures: int) -> Specimen:
    """The loss is NaN for its first ``num_failures`` calls, whatever it is called with."""
    model = Model(layer=diagonal(1.0))
    calls: list[int] = []

    def loss_fn(batch: Batch) -> Tensor:
        calls.append(1)
        poison = float("nan") if len(calls) <= num_failures else 1.0
        return model(batch["x"]).pow(2).mean() * poison

    return trained(model, loss_fn, batches=({"x": ones()},) * 2)


def fails_once(specimen: Specimen) -> bool:
    """Return whether the same batch fails and then does not, with the same weights."""
    first, second = (specimen.loss_fn(specimen.batches[0]).item() for _ in range(2))
    return not math.isfinite(first) and math.isfinite(second)


def large_buffer(num_elements: int) -> Specimen:
    """The loss needs a buffer of ``num_elements`` float32."""
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        buffer = torch.zeros(num_elements)
        return model(batch["x"]).pow(2).mean() + buffer[0]

    return trained(model, loss_fn)


def memory_runs_out(specimen: Specimen) -> bool:
    """Return whether an allocation fails."""
    return "allocate memory" in run_plain(specimen).error


def child_hangs(specimen: Specimen) -> bool:
    """Return whether a process never comes to an end."""
    return "stood still" in run_plain(specimen).error


class Reducer:
    """Copies each gradient into a bucket that a second thread sends round and writes back.

    ``overlapped``: it is sent before the copy is complete. The memory of a new bucket holds NaN, as
    deterministic mode fills it; later the bucket of the step before is sent.
    """

    def __init__(self, model: nn.Module, *, overlapped: bool) -> None:
        self.overlapped = overlapped
        self.buckets: dict[Tensor, Tensor] = {
            p: torch.full_like(p, math.nan) for p in model.parameters()
        }
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: Tensor) -> None:
        bucket, gradient = self.buckets[parameter], parameter.grad
        assert gradient is not None
        mine = gradient.clone()
        communication = threading.Thread(target=gradient.copy_, args=(bucket,))
        if self.overlapped:
            communication.start()
            communication.join()
            bucket.copy_(mine)
        else:
            bucket.copy_(mine)
            communication.start()
            communication.join()


def overlapped(early: bool) -> Specimen:
    """Gradients go through a ``Reducer``, which sends them too ``early``."""
    model = Model(layer=diagonal(1.0))
    reducer = Reducer(model, overlapped=early)
    return trained(model, lambda batch: model(batch["x"]).pow(2).mean() * len(reducer.buckets))


class Copies(nn.Module):
    """Two copies of a layer, as two ranks have them: each sees half of a batch.

    ``exchanged``: their gradients are made the mean of both before an update takes them.
    """

    def __init__(self, *, exchanged: bool) -> None:
        super().__init__()
        self.first, self.second = diagonal(1.0), diagonal(1.0)
        for parameter in self.parameters() if exchanged else ():
            parameter.register_post_accumulate_grad_hook(self.exchange)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2)
        return torch.cat([self.first(one), self.second(other)])

    @torch.no_grad()
    def exchange(self, _: Tensor) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if len(gradients) == 2:
            mean = (gradients[0] + gradients[1]) / 2
            for gradient in gradients:
                gradient.copy_(mean)


def copies(exchanged: bool) -> Specimen:
    """Two copies of a layer are trained on other data each."""
    x = ones()
    x[2:] *= 0.5
    return trained(Model(ranks=Copies(exchanged=exchanged)), lr=0.1, batches=({"x": x},) * 3)


def copies_differ(specimen: Specimen) -> bool:
    """Return whether the two have other weights in the end."""
    run_plain(specimen)
    first, second = specimen.model.parameters()
    return not torch.equal(first, second)


FAULTS: Mapping[str, Entry] = {
    "NS601": pair(
        child_process,
        "import signal; signal.raise_signal(signal.SIGFPE)",
        "import signal",
        child_is_killed,
    ),
    "NS602": pair(fused_attention, 7e18, 7.0, loss_fails),
    "NS603": pair(flaky, 1, 0, fails_once),
    "NS604": pair(large_buffer, 2**58, 4, memory_runs_out),
    "NS605": Entry(
        partial(child_process, "import time; time.sleep(60)", limit=1.0),
        partial(child_process, "import time; time.sleep(0)"),
        child_hangs,
    ),
    "NS606": pair(overlapped, True, False, gradient_fails),
    "NS607": pair(copies, False, True, copies_differ, quiet=True),
}
