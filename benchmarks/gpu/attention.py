"""A defect that nobody planted: cuDNN attention's backward with an explicit mask.

TRL issue 7181, PyTorch issue 196678, torch 2.11 to 2.13 on H100 and H200: where the length is 64
more than a multiple of 128, the last key tile's padded half is scored 0 instead of -inf, and a row
whose logsumexp is below -88.7 gets an Inf there, times 0. First the kernel alone, then a step of
DPO's shape that comes to it, watched.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2Config, Qwen2ForCausalLM

import nanstop
from gpu import models
from gpu.machine import Machine, Row
from nanstop.demo.quiet import quiet

LENGTHS = (640, 704, 768, 832)
SCORE = -120.0
"""Of every query with every key: below ln(2^-128)."""
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def run(machine: Machine) -> list[Row]:
    """Return rows of the kernel alone, by backend and length, and one of the watched training."""
    lengths = (64, 128) if machine.toy else LENGTHS
    rows: list[Row] = []
    for name in BACKENDS:
        backend = getattr(SDPBackend, name, None)
        rows += [
            {"what": name, "length": length} | _kernel(machine, backend, length)
            for length in (lengths if backend is not None else ())
        ]
    if not any(row["what"] == BACKENDS[0] and row["outcome"] == "bad gradients" for row in rows):
        machine.lack("the defect: no cuDNN attention of this device and this torch shows it")
    return [*rows, {"what": "DPO step, watched", "length": lengths[1]} | _step(machine, lengths[1])]


def _kernel(machine: Machine, backend: Any, length: int) -> Row:
    """Return how many values of the query's gradient are not finite, if the backend runs at all."""
    width = 64
    torch.manual_seed(0)
    query, key, value = (
        0.1 * torch.randn(1, 1, length, width, device=machine.device, dtype=torch.bfloat16)
        for _ in range(3)
    )
    query[..., 0], key[..., 0] = 1.0, SCORE * math.sqrt(width)
    leaves = [one.requires_grad_() for one in (query, key, value)]
    mask = torch.ones(length, length, dtype=torch.bool, device=machine.device).tril()[None, None]
    try:
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
            out.backward(torch.ones_like(out))
    except RuntimeError:
        return {"outcome": "not to be had here", "bad": None}
    assert query.grad is not None
    bad = int((~query.grad.isfinite()).sum())
    return {"outcome": "bad gradients" if bad else "finite", "bad": bad}


def _model(machine: Machine) -> Qwen2ForCausalLM:
    """Return a small Qwen2 one of whose heads scores -120 everywhere, by its biases in the pair of
    dimensions that positions turn least.
    """
    with models.born(machine, torch.bfloat16):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                vocab_size=512,
                rope_parameters={"rope_type": "default", "rope_theta": 1e8},
                pad_token_id=0,
            )
        )
    width, attention = 64, model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.bias[width // 2 - 1] = 10.0
        attention.k_proj.bias[width // 2 - 1] = SCORE * math.sqrt(width) / 10.0
    return model


def _step(machine: Machine, length: int) -> Row:
    """Return what nanstop says of ten steps of DPO's shape: pairs of answers, padded, a mask;
    beside it what the same steps come to without it, as they are and with other kernels.
    """
    watched = _trained(machine, length, watched=True)
    plain = _trained(machine, length)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        other = _trained(machine, length)
    found = watched.pop("incidents")
    row: Row = {
        "outcome": "nothing to report",
        "last loss": watched["last loss"],
        "weights finite": watched["weights finite"],
        "plain loss": plain["last loss"],
        "plain weights finite": plain["weights finite"],
        "loss of other kernels": other["last loss"],
    }
    if not found:
        return row
    first = found[0]
    place = first.localization.first_bad if first.localization is not None else None
    return row | {
        "outcome": ", ".join(one.code for one in first.diagnoses),
        "incidents": len(found),
        "op": place.op if place is not None else None,
        "cure": " + ".join(map(str, first.proof.minimal)) if first.proof is not None else None,
        "verdict": first.proof.verdict if first.proof is not None else None,
        "last action": first.audit[-1].action.kind if first.audit else None,
    }


def _trained(machine: Machine, length: int, *, watched: bool = False) -> Row:
    model = _model(machine).train()
    optimizer = models.optimizer_of(model, machine)

    def answers(batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits.float()
        scores = logits[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
        return (scores * batch["mask"][:, 1:]).sum(-1)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        chosen, rejected = answers(batch).chunk(2)
        return -functional.logsigmoid(0.01 * (chosen - rejected)).mean()

    losses, incidents = [], ()
    with tempfile.TemporaryDirectory() as out, ExitStack() as scope:
        watch: Any = None
        if watched:
            scope.enter_context(quiet())
            watch = scope.enter_context(nanstop.watch(model, optimizer, out=out))
        for number in range(3 if machine.toy else 10):
            ids = models.batch(model, machine, 4, length, number)["input_ids"]
            mask = torch.ones_like(ids)
            mask[1, -7:] = 0
            batch = {"ids": ids, "mask": mask}
            if watch is not None:
                losses.append(watch.step(loss, batch))
                watch.update(clip=1.0)
                continue
            losses.append(loss(batch))
            losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        incidents = watch.incidents if watch is not None else ()
    return {
        "last loss": float(losses[-1].detach()),
        "weights finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "incidents": incidents,
    }
