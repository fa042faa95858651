"""Every planted fault is found by the whole engine under its own code, and its healthy twin is
left in peace.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import nanstop
from nanstop.commands.explain.exhibit import probed
from nanstop.faults.specimen import Specimen
from nanstop.faults.table import ZOO

torch.set_num_threads(1)


def codes_found(specimen: Specimen, out) -> tuple[set[str], list[str]]:
    """Train the specimen watched; return all codes of incidents and findings, and the best code of
    each incident.

    A scaler's collapse shows only where nothing is done about its cause.
    """
    policy = "observe" if specimen.scaler is not None else "skip"
    watch = nanstop.watch(specimen.model, specimen.optimizer, policy=policy, out=out)
    with contextlib.suppress(nanstop.NanstopError, IndexError, RuntimeError), watch:
        for batch in specimen.batches:
            watch.step(specimen.loss_fn, batch)
            watch.update(clip=specimen.clip, scaler=specimen.scaler)
    best = [report.diagnoses[0].code for report in watch.incidents]
    every = {d.code for report in watch.incidents for d in report.diagnoses}
    return every | {finding.code for finding in watch.findings}, best


BY_PROBE = ("NS110", "NS111", "NS208", "NS303")
ELSEWHERE = (
    "NS104",
    "NS108",
    "NS117",
    "NS119",
    "NS208",
    "NS303",
    "NS601",
    "NS604",
    "NS605",
    "NS606",
    "NS607",
    "NS703",
    "NS801",
    "NS802",
)
ENGINE = [code for code in ZOO if code not in ELSEWHERE]
"""The machine of a known stack, or without a format, is not this one; what a transformers log
shows is tested with a real Trainer; what only a script that is watched from outside shows, with
one; what only a probe sees is below, or tested with a trainer
that accumulates; how a process dies, with one that does, and what several ranks share, with two.
"""


@pytest.mark.parametrize("code", ENGINE)
def test_fault_is_found(code, tmp_path):
    found, best = codes_found(ZOO[code].fault(), tmp_path)
    assert code in found, best


@pytest.mark.parametrize("code", ENGINE)
def test_healthy_twin_is_left_in_peace(code, tmp_path):
    found, best = codes_found(ZOO[code].healthy(), tmp_path)
    assert not best
    assert code not in found


@pytest.mark.parametrize("code", BY_PROBE)
def test_probe_finds_the_fault_and_not_the_twin(code):
    assert code in {finding.code for finding in probed(ZOO[code].fault())}
    assert code not in {finding.code for finding in probed(ZOO[code].healthy())}
