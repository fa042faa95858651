"""Objectives that compare a policy with rewards, with a reference, or with its own rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nanstop.faults.parts import Model, diagonal, ones, trained
from nanstop.faults.specimen import Batch, Entry, Specimen, loss_fails, pair, run_plain

NUM_STEPS = 64


def _states(rows: int = 3) -> Tensor:
    x = ones(rows=rows)
    x[:, :, 0] = torch.arange(float(rows))[:, None]
    return x


def _relative(rewards: Tensor) -> Tensor:
    """Return the advantages of one group."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def rewarded(rewards: tuple[float, ...], num_steps: int = NUM_STEPS) -> Specimen:
    """A group of completions with these rewards, several times."""
    model = Model(head=diagonal(0.5))

    def loss_fn(batch: Batch) -> Tensor:
        logps = -cross_entropy(model(batch["x"]).mT, batch["chosen"], reduction="none")
        return -(logps * _relative(batch["rewards"])[:, None]).mean()

    x = _states(len(rewards))
    chosen = torch.zeros(x.shape[:2], dtype=torch.long)
    batch = {"x": x, "chosen": chosen, "rewards": torch.tensor(rewards)}
    return trained(model, loss_fn, batches=(batch,) * num_steps)


def nothing_differs(specimen: Specimen) -> bool:
    """Return whether a finite loss has a gradient of exactly 0."""
    run = run_plain(specimen)
    return run.healthy and run.num_nonzero_gradients == 0


def against_reference(gap: float) -> Specimen:
    """The k3 estimate of the KL to a reference that likes one token ``gap`` nats better."""
    model = Model(head=diagonal(0.5))
    ref_logps = model(_states()).log_softmax(-1)[..., 0].detach()
    ref_logps[1, 2] += gap

    def loss_fn(batch: Batch) -> Tensor:
        logps = model(batch["x"]).log_softmax(-1)[..., 0]
        kl = torch.exp(batch["ref_logps"] - logps) - (batch["ref_logps"] - logps) - 1
        return (kl - logps).mean()

    return trained(model, loss_fn, batches=({"x": _states(), "ref_logps": ref_logps},))


def rolled_out(temperature: float) -> Specimen:
    """Log-probabilities of completions, noted at another temperature than the loss's 1."""
    model = Model(head=diagonal(2.0))
    old_logps = (model(_states()) / temperature).log_softmax(-1)[..., 0].detach()

    def loss_fn(batch: Batch) -> Tensor:
        ratio = torch.exp(model(batch["x"]).log_softmax(-1)[..., 0] - batch["old_logps"])
        return -(ratio * batch["advantages"][:, None]).mean()

    advantages = torch.tensor([1.0, 0.0, -1.0])
    batch = {"x": _states(), "old_logps": old_logps, "advantages": advantages}
    return trained(model, loss_fn, batches=(batch,))


def ratio_is_off(specimen: Specimen) -> bool:
    """Return whether the first ratios are more than 5 % off 1."""
    batch = specimen.batches[0]
    logps = specimen.model(batch["x"]).log_softmax(-1)[..., 0]
    return bool(((logps - batch["old_logps"]).exp() - 1.0).abs().mean() > 0.05)


FAULTS: Mapping[str, Entry] = {
    "NS701": pair(rewarded, (1.0, 1.0, 1.0), (2.0, 1.0, 0.0), nothing_differs, quiet=True),
    "NS702": pair(against_reference, 100.0, 1.0, loss_fails),
    "NS703": pair(rolled_out, 0.6, 1.0, ratio_is_off, quiet=True),
    "NS704": pair(rewarded, (1.0, math.inf, 0.0), (1.0, 0.5, 0.0), loss_fails),
}
