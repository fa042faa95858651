"""What a raw loop is, as structure tells it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nanstop.hosts import compat
from nanstop.hosts.accelerate.precision import precision_of_accelerate
from nanstop.hosts.model.structure import structure
from nanstop.hosts.model.view import PlainView
from nanstop.ranks import rank
from nanstop.records import RunFacts


def facts_of_loop(view: PlainView, **known: Any) -> RunFacts:
    """Return what structure tells of a raw loop; ``known`` are further fields of ``RunFacts``."""
    asked: dict[str, Any] = {
        "host": "loop",
        "precision": precision_of_accelerate(),
        "world_size": _world_size(),
    }
    facts = RunFacts(**(asked | structure(view, compat.base_model(view.model)) | known))
    return _as_it_began(facts) if facts.is_updated_inside else facts


def _as_it_began(facts: RunFacts) -> RunFacts:
    """Return the facts without what is said of the run's beginning and was read behind its first
    update.
    """
    optimizer = facts.optimizer and replace(facts.optimizer, state_faults=())
    return replace(facts, optimizer=optimizer, odd_weights=())


def present_rank() -> int:
    """Return which process of a group this is; of none, what a launcher says of it."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return rank()


def _world_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
