"""One run of ``full_card``: a Qwen2 that is trained, bounded, and comes to an overflow."""

from __future__ import annotations

import faulthandler
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import nanstop
from gpu import models
from gpu.machine import Machine, Row, present
from nanstop.demo.quiet import quiet

LEFT = 0.1
"""What the process may have beyond what the step's own allocator reserved, as a share of what was
allocated at its peak.
"""
LENGTH, RARE, LOUD, LARGE = 512, 2, 400.0, 400.0
"""Tokens; the one that no batch draws; what it comes to in one layer, whose square float16 has not;
its value in a dimension that no other token has a value in.
"""
HEALTHY = 2
"""Steps before the one that fails; one comes after it."""


class Peaks:
    """The most that this process's tensors took of the card, and the most that its allocator had
    reserved for them: nanstop sets torch's peaks back for each of its runs.
    """

    def __init__(self, machine: Machine) -> None:
        self._has_cuda, self.most, self.most_reserved = machine.has_cuda, 0, 0
        if machine.has_cuda:
            self._reset: Callable[..., None] = torch.cuda.reset_peak_memory_stats
            torch.cuda.reset_peak_memory_stats = self._noted

    def _noted(self, *given: Any) -> None:
        self.most, self.most_reserved = self.bytes(), self.reserved()
        self._reset(*given)

    def begin(self) -> None:
        if self._has_cuda:
            self._reset()
            self.most = self.most_reserved = 0

    def bytes(self) -> int:
        return max(self.most, torch.cuda.max_memory_allocated()) if self._has_cuda else 0

    def reserved(self) -> int:
        return max(self.most_reserved, torch.cuda.max_memory_reserved()) if self._has_cuda else 0


def planted(machine: Machine, size: str) -> Any:
    """Return a model in whose middle layer one token's values leave float16, and no other's come
    near: a dimension is that token's alone.
    """
    model = models.qwen2(size, machine, torch.float16)
    layers, inner = model.model.layers, model.model.norm
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[RARE, 0] = LARGE
        inner.weight[0] = 0.0
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = (
                attention.q_proj,
                attention.k_proj,
                attention.v_proj,
                mlp.gate_proj,
                mlp.up_proj,
            )
            for one in readers:
                one.weight[:, 0] = 0.0
            for one in (attention.o_proj, mlp.down_proj):
                one.weight[0] = 0.0
        mlp = layers[len(layers) // 2].mlp
        for one in (mlp.gate_proj, mlp.up_proj):
            one.weight[0] = 0.0
            one.weight[0, 0] = LOUD / model.config.hidden_size**0.5
        mlp.down_proj.weight[1:, 0] = 1e-4
    model.gradient_checkpointing_enable()
    return model.train()


def optimizer_of(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    """Return SGD: float16 has no square of a small gradient, which AdamW would hold."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=momentum)


class Run:
    """One run. ``row``: what is known of it, written down as it comes to be known."""

    def __init__(self, machine: Machine, given: dict[str, Any]) -> None:
        self.machine, self.peaks = machine, Peaks(machine)
        self.model = planted(machine, given["size"])
        self.optimizer = optimizer_of(self.model, given["momentum"])
        self.length, self.says = 16 if given["size"] == "toy" else LENGTH, True
        count = sum(p.numel() for p in self.model.parameters())
        self.row: Row = {"size": given["size"], "momentum": given["momentum"], "parameters": count}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def batch(self, number: int, *, rare: bool = False) -> dict[str, Tensor]:
        batch = models.batch(self.model, self.machine, 1, self.length, number)
        if rare:
            batch["input_ids"][0, self.length // 2] = RARE
        return batch

    def know(self, **columns: Any) -> None:
        self.row |= {name.replace("_", " "): value for name, value in columns.items()}
        if self.says:
            print(json.dumps(self.row), file=sys.__stdout__, flush=True)

    def unwatched(self) -> float:
        """Train without nanstop; return the milliseconds of a micro-batch, and bound the process
        to what that took, fragments and all, and a share more.
        """
        times = []
        for number in range(4):
            if number <= 1:  # the first warms up: workspaces, moments
                if self.machine.has_cuda:
                    torch.cuda.empty_cache()
                self.peaks.begin()
            batch = self.batch(number)
            times.append(self.machine.milliseconds(lambda: self.loss(batch).backward()))  # noqa: B023
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        usual = statistics.median(times)
        self.know(micro_batch_ms=round(usual, 2))
        if self.machine.has_cuda:
            self._copied()
            own, reserved = self.peaks.bytes(), self.peaks.reserved()
            bound, total = reserved + LEFT * own, torch.cuda.mem_get_info()[1]
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(1.0, bound / total))
            self.know(own_peak_gib=round(own / 2**30, 2))
            self.know(own_reserved_gib=round(reserved / 2**30, 2))
            self.know(bound_gib=round(bound / 2**30, 2))
        return usual

    def _copied(self) -> None:
        """How fast the host takes what goes out of the way, into new memory, and gives it back."""
        largest = max(self.model.parameters(), key=lambda p: p.nbytes).detach()
        away: list[Tensor] = []
        for name, work in (
            ("to", lambda: away.append(largest.cpu())),
            ("from", lambda: largest.copy_(away[0])),
        ):
            rate = largest.nbytes / 2**30 / (1e-3 * self.machine.milliseconds(work))
            self.know(**{f"{name}_host_gib_s": round(rate, 2)})

    def failed_step(self, out: str, usual: float) -> None:
        places = {name: p.data_ptr() for name, p in self.model.named_parameters()}
        own = self.peaks.bytes()
        with nanstop.watch(self.model, self.optimizer, out=out) as watch:
            for number in range(HEALTHY + 2):
                rare = number == HEALTHY
                self.peaks.begin()
                batch, began = self.batch(number, rare=rare), time.perf_counter()
                watch.step(self.loss, batch)
                watch.update(clip=1.0)
                self.machine.synchronise()
                seconds = time.perf_counter() - began
                if rare:
                    self.know(
                        failing_step_s=round(seconds, 2), micro_batches=round(1e3 * seconds / usual)
                    )
                    if self.machine.has_cuda:
                        above = 100.0 * (self.peaks.bytes() / own - 1.0)
                        self.know(above_own_percent=round(above, 1))
                if number >= HEALTHY:
                    self.stands(watch, places)

    def stands(self, watch: Any, places: dict[str, int]) -> None:
        """Note what was found, and what the weights are."""
        reports = [one for one in watch.incidents if one.incident.at.step == HEALTHY]
        named = dict(self.model.named_parameters())
        bad = sum(not bool(p.isfinite().all()) for p in named.values())
        moved = sum(places[name] != p.data_ptr() for name, p in named.items())
        others = len(watch.incidents) - len(reports)
        self.know(went_on="yes" if reports else "NO: nothing was found", others=others)
        self.know(bad_weights=bad, moved_weights=moved)
        for report in reports:
            self.told(report)

    def told(self, report: Any) -> None:
        proof = report.proof
        if report.audit:
            self.know(action=report.audit[-1].action.kind)
        if proof is not None:
            short = sum(trial.outcome == "oom" for trial in proof.tried)
            cure = " + ".join(map(str, proof.minimal))
            self.know(verdict=proof.verdict, cure=cure, scope=proof.scope)
            self.know(trials=len(proof.tried), without_room=short)
            self.know(trials_s=round(sum(trial.seconds for trial in proof.tried), 2))
        self.know(left_out="; ".join(report.failures))


def main() -> None:
    given = json.loads(sys.argv[1])
    machine = present(toy=given["toy"], minutes=given["seconds"] / 60.0)
    faulthandler.dump_traceback_later(given["seconds"] - 3)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as out, quiet():
        torch.set_num_threads(threads)  # quiet is for small models
        if not machine.toy:  # all that an investigation imports is imported
            first = Run(machine, given | {"size": "toy"})
            first.says = False
            first.failed_step(f"{out}/first", 1.0)
            del first
        one = Run(machine, given)
        try:
            one.failed_step(f"{out}/run", one.unwatched())
        except torch.OutOfMemoryError as error:
            one.know(went_on=f"NO: out of memory: {str(error).splitlines()[0][:120]}")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    one.know(host_peak_gib=round(host / 2**30, 1))


if __name__ == "__main__":
    main()
