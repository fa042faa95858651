"""How often an unmodified replay of a failing step is bitwise equal on this device, and what that
does to the proof.

A loss that takes a logarithm of 0 in its fourth step, in a model with dropout: watched as a user
would, with torch's default and with its deterministic algorithms.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from itertools import product
from typing import Any

import torch
from torch import Tensor

import nanstop
from gpu import models
from gpu.machine import Machine, Row
from nanstop.demo.quiet import quiet

RUNS = 10
STRIKES = 3
"""The step that fails, from 0."""


def run(machine: Machine) -> list[Row]:
    """Return a row for each format and setting: what came of all runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = list(product((torch.float32, torch.bfloat16), (False, True)))
    replays: dict[Any, Counter[str]] = {one: Counter() for one in settings}
    proofs: dict[Any, Counter[str]] = {one: Counter() for one in settings}
    for seed, (dtype, deterministic) in product(range(1 if machine.toy else RUNS), settings):
        if machine.goes_on(f"run {seed} of {_name(dtype)}, deterministic {deterministic}"):
            fidelity, verdict = _failed(machine, dtype, seed, deterministic=deterministic)
            replays[dtype, deterministic][fidelity] += 1
            proofs[dtype, deterministic][verdict] += 1
    return [
        {
            "format": _name(dtype),
            "deterministic": deterministic,
            "runs": replays[dtype, deterministic].total(),
            "replays": dict(replays[dtype, deterministic]),
            "proofs": dict(proofs[dtype, deterministic]),
        }
        for dtype, deterministic in settings
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _failed(
    machine: Machine, dtype: torch.dtype, seed: int, *, deterministic: bool
) -> tuple[str, str]:
    """Return the fidelity of the replay and the verdict on the cure of one failing run."""
    model = models.qwen2("toy" if machine.toy else "0.5B", machine, dtype).train()
    model.model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    optimizer = models.optimizer_of(model, machine)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    number = 0

    def loss(batch: dict[str, Tensor]) -> Tensor:
        given = {name: value for name, value in batch.items() if name != "factor"}
        return model(**given).loss + (batch["factor"].log() * 0.0).mean()

    try:
        with tempfile.TemporaryDirectory() as out, quiet():
            with nanstop.watch(model, optimizer, out=out, policy="observe") as watch:
                for number in range(STRIKES + 1):
                    given = models.batch(model, machine, 2, 16 if machine.toy else 256, number)
                    factor = torch.full((2,), 0.0 if number == STRIKES else 1.0)
                    watch.step(loss, given | {"factor": factor.to(machine.device)})
                    watch.update(clip=1.0)
            reports = watch.incidents
    finally:
        torch.use_deterministic_algorithms(False)
    if not reports:
        return "nothing was seen", "none"
    replay, proof = reports[0].replay, reports[0].proof
    return (
        replay.fidelity if replay is not None else "none",
        proof.verdict if proof is not None else "none",
    )
