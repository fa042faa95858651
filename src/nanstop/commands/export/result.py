"""What ``nanstop export`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTrial:
    """A checkpoint run in one number format on the inputs of the export.

    ``under_plan``: with the remedies of its plan, which needs nanstop; else without nanstop.
    ``largest``: the largest finite magnitude that a module gave out; ``limit``: that of the format.
    ``first_bad``: the module whose output was the first that is not finite. ``distance``: of
    its logits to those of float32, as a share of these, of the batch where it is largest; None
    where one of the two is not finite. ``problem``: why it could not be run, "" where it was.
    """

    dtype: str
    under_plan: bool = False
    finite: bool = False
    largest: float = 0.0
    limit: float = 0.0
    first_bad: str = ""
    distance: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A checkpoint, in which formats it is finite without nanstop, and what was written of it.

    ``stored``: the format of most of its weights. ``needed``: what its run was kept finite by, as a
    phrase; ``failed_in``: the format that this run had failed in. Both "" where there is no plan.
    ``dtype``: the format that was written, "" where nothing was, because of ``reason``.
    ``left_out``: files of the folder that hold no part of the model, or weights that were not read.
    ``rounded``: how many values the written format could not hold exactly.
    """

    folder: str
    out: str
    stored: str
    is_adapter: bool
    inputs: tuple[str, ...]
    device: str
    trials: tuple[FormatTrial, ...]
    needed: str = ""
    failed_in: str = ""
    dtype: str = ""
    reason: str = ""
    num_bytes: int = 0
    rounded: int = 0
    left_out: tuple[str, ...] = ()
