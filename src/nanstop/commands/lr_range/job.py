"""What every learning-rate sweep of a script keeps: its rates, its losses, and how they get to the process above."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from nanstop.commands.lr_range.curve import has_diverged, rates
from nanstop.commands.lr_range.lr_range import VARIABLE, SweepPlan
from nanstop.commands.lr_range.sweep import set_rates, shares_of, sweep
from nanstop.hosts.patch_table import Table
from nanstop.store.files import write_whole

_WRITERS = (
    ("torch", "", "save"),
    ("torch.distributed.checkpoint", "", "save"),
    ("safetensors.torch", "", "save_file"),
    ("safetensors.torch", "", "save_model"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained"),
    ("transformers.trainer", "Trainer", "save_model"),
    ("transformers.trainer", "Trainer", "_save_checkpoint"),
    ("transformers.trainer", "Trainer", "push_to_hub"),
    ("peft", "PeftModel", "save_pretrained"),
    ("accelerate", "Accelerator", "save_state"),
    ("accelerate", "Accelerator", "save_model"),
)
"""(module, class or nothing, name) of what writes weights; looked for where the module is imported."""

_BY_HAND = "(step, model, optimizer) tests a step of your own"


def planned() -> SweepPlan:
    """Return the plan that this process runs under."""
    return SweepPlan(**json.loads(os.environ[VARIABLE]))


class LrRecorder:
    """The rate of each optimizer step, and the loss of each: one more than rates, that after the last.

    ``problem``: why this training cannot be swept; empty where it can.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self.rates = rates(plan.low, plan.high, plan.steps)
        self.losses: list[float] = []
        self.problem = ""
        self._shares: dict[int, tuple[float, ...]] = {}

    def set_rate(self, optimizer: Any, step: int) -> None:
        """Set the rate of a step, counted from 0; groups keep their shares. No synchronisation after the first."""
        shares = self._shares.setdefault(id(optimizer), shares_of(optimizer))
        # After the last measured loss nothing more may be learnt from an update.
        set_rates(optimizer, shares, self.rates[min(step, len(self.rates) - 1)])

    def is_over(self, *, world_size: int) -> bool:
        """Return whether enough is known. Ranks see different losses: together they run to the end."""
        first, after = self.losses[:1], self.losses[1:]
        if len(after) >= len(self.rates) or self.problem:
            return True
        return world_size == 1 and bool(first) and has_diverged(first[0], after)

    def write(self) -> None:
        """Write what was measured as JSON; losses are strings, as non-finite ones have to be."""
        measured = {"losses": [repr(loss) for loss in self.losses], "problem": self.problem}
        measured["hint"] = f"{sweep.__module__}.{sweep.__name__}{_BY_HAND}"
        write_whole(Path(self.plan.out), json.dumps(measured).encode())


def save_nothing(table: Table, *, writers: Sequence[tuple[str, str, str]] = _WRITERS) -> None:
    """Have nothing that writes weights write any: those of a sweep are of no use, and may stand in for good ones."""
    for module, kind, name in writers:
        owner = sys.modules.get(module)
        owner = getattr(owner, kind, None) if kind else owner
        if owner is not None and hasattr(owner, name):
            table.replace(owner, name, lambda *_args, **_options: None)


def end() -> NoReturn:
    """End the process: neither an ``except`` nor a ``finally`` of the script may go on to use what was swept."""
    from nanstop.process.inject import dry_run_child

    dry_run_child.end()
