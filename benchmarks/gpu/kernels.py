"""What nanstop does over kernels that are not plain torch: compiled code, attention's backends,
Triton, Liger, 4-bit weights, 8-bit moments, float8.

Each kind is trained for a few healthy steps, twice unwatched and once watched, and then with a
batch that makes its kernel fail. A kind that raises is a row that says so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import nanstop
from gpu.kernel_kinds import KINDS, VOCABULARY, Kind, Net
from gpu.machine import Machine, Row
from gpu.models import born
from nanstop.demo.quiet import quiet

STEPS, STRIKES = 6, 3
"""``STRIKES``: the step that fails, from 0."""


def run(machine: Machine) -> Iterator[Row]:
    """Return, of each kind, a row of its healthy runs and one of each fault."""
    for kind in KINDS:
        if not machine.goes_on(kind.name):
            break
        if kind.cuda and not machine.has_cuda:
            machine.lack(f"{kind.name}: a CPU has no such kernel")
            continue
        if kind.slow and machine.toy:
            machine.lack(f"{kind.name}: takes too long for a toy")
            continue
        if not all(machine.has(package, kind.name) for package in kind.needs):
            continue
        for what in ("healthy", *kind.faults):
            began = time.monotonic()
            row = {"kind": kind.name, "run": what} | _tried(kind, what, machine)
            yield row | {"seconds": round(time.monotonic() - began, 1)}


def _tried(kind: Kind, what: str, machine: Machine) -> Row:
    """Return what came of one run, an exception too: the next kind is to be seen."""
    try:
        with quiet():
            return _healthy(kind, machine) if what == "healthy" else _failed(kind, what, machine)
    except Exception as error:
        text = " ".join(str(error).split())
        return {"outcome": f"{type(error).__name__}: {text[:160]}"}


def _healthy(kind: Kind, machine: Machine) -> Row:
    """Return the incidents of a watched run, and whether its weights are those of one that is not
    watched; ``repeats``: whether two of those have the same.
    """
    first, again = _unwatched(kind, machine), _unwatched(kind, machine)
    with tempfile.TemporaryDirectory() as out:
        model, watch, _ = _watched(kind, machine, out, gain=1.0)
    return {
        "outcome": f"{len(watch.incidents)} incidents, {len(watch.findings)} findings",
        "repeats": _same(first, again),
        "bitwise": _same(first, model),
        "code": ", ".join(one.code for one in watch.findings),
    }


def _failed(kind: Kind, what: str, machine: Machine) -> Row:
    """Return what nanstop says first of a run whose fourth batch fails."""
    with tempfile.TemporaryDirectory() as out:
        model, watch, losses = _watched(kind, machine, out, gain=kind.faults[what])
    kept = all(bool(one.isfinite().all()) for one in model.parameters())
    if not watch.incidents:
        return {"outcome": f"nothing was seen, loss {losses[STRIKES]:.3g}, weights finite: {kept}"}
    report = watch.incidents[0]
    found, replay, proof = report.localization, report.replay, report.proof
    place = found.first_bad if found is not None else None
    line = place.source if place is not None else None
    return {
        "outcome": f"{len(watch.incidents)} incidents, weights finite: {kept}",
        "code": ", ".join(one.code for one in report.diagnoses),
        "op": place and place.op,
        "phase": place and place.phase,
        "module": place and place.module,
        "line": line and " ".join(line.text.split()),
        "reference": place and place.reference,
        "not seen": found and "; ".join(found.blind_spots),
        "replay": replay and f"{replay.fidelity}, {replay.num_failed} of {replay.runs} fail",
        "eager": replay and replay.eager,
        "verdict": proof and proof.verdict,
    }


def _unwatched(kind: Kind, machine: Machine) -> nn.Module:
    model, optimizer, loss = _built(kind, machine)
    for batch in _batches(machine, gain=1.0):
        with kind.around():
            loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _watched(
    kind: Kind, machine: Machine, out: str, gain: float
) -> tuple[nn.Module, Any, list[float]]:
    model, optimizer, loss = _built(kind, machine)
    losses: list[float] = []
    watch: Any
    with kind.around(), nanstop.watch(model, optimizer, out=out) as watch:
        for batch in _batches(machine, gain):
            losses.append(float(watch.step(loss, batch)))
            watch.update(clip=1.0)
    return model, watch, losses


def _built(kind: Kind, machine: Machine) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a new model with the same weights each time, its optimizer and its loss."""
    with born(machine, kind.dtype):
        net = Net(kind.layer, 64 if machine.toy else 128)
    model = kind.made(net.to(machine.device))
    optimizer = kind.optimizer([one for one in model.parameters() if one.requires_grad])
    entropy = kind.entropy()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"], batch["gain"])
        return entropy(logits.flatten(0, 1), batch["ids"].flatten())

    return model, optimizer, loss


def _batches(machine: Machine, gain: float) -> Iterator[dict[str, Tensor]]:
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (4, 16 if machine.toy else 128), generator=generator)
        factor = torch.tensor(gain if number == STRIKES else 1.0)
        yield {"ids": ids.to(machine.device), "gain": factor.to(machine.device)}


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)
