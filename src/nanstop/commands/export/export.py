"""A checkpoint that computes finite without nanstop, or why there is none.

Each format is tried by loading the checkpoint as its user does, in this process and without any
remedy. What is written is loaded once more, and has to give the logits of its trial bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nanstop.commands.export.inputs import Inputs, inputs_for
from nanstop.commands.export.result import Export, FormatTrial
from nanstop.commands.export.trial import ModelInput, distance, tried
from nanstop.commands.export.write import write
from nanstop.commands.scan.checkpoint_files import Checkpoint, open_checkpoint
from nanstop.errors import NanstopError, unknown
from nanstop.hosts.model.load import adapter_base, load_as_user
from nanstop.records import PrecisionPlan
from nanstop.records.formats import BY_SHORT_NAME
from nanstop.records.remedies import describe, of_the_forward
from nanstop.store.beside_weights import plan_beside

FORMATS = ("float32", "bfloat16", "float16")
"""In the order in which they are tried: the others are compared with float32."""

_CARD = """\
## Numerical precision

Written by `nanstop export` for {dtype}, in which it computes finite numbers without nanstop on
{inputs}.
{rest}"""

FAR = 0.05
"""Logits that are farther from float32's, as a share of these, are another model's: bfloat16 alone
moves them by about 0.01.
"""


def export(
    folder: Path, out: Path, *, dtype: str | None = None, data: Path | None = None
) -> Export:
    """Return in which formats a checkpoint is finite, and write it in one of those.

    ``dtype``: the format to write; else that of its weights where it is finite in it and its run
    has not failed in it, else bfloat16 where it computes there what it does in float32, else
    float32. ``data``: a file of token ids to run it on.
    Errors: ``NanstopError`` for what is no checkpoint of a model, where ``out`` is there already,
    and where it can't be written: nothing is lost or left half.
    """
    wanted = _format_named(dtype)
    _require_free(folder, out)
    opened = open_checkpoint(folder)
    base = adapter_base(folder) if opened.kind == "adapter" else folder
    weights = open_checkpoint(base) if opened.kind == "adapter" else opened
    if weights.config.get("quantization_config"):
        raise NanstopError(
            f"{base}: its weights are quantized, and stay in their format",
            hint="load it with its plan: nanstop.load_plan(DIR).apply(model)",
        )
    plan = plan_beside(folder)
    needed = of_the_forward(plan.remedies)
    stored = _stored(weights)
    device = _device(weights)
    inputs = inputs_for(folder, load_as_user(folder, torch.float32), data)
    trials, logits = _trials(folder, inputs, device)
    found = Export(
        folder=str(folder),
        out=str(out),
        stored=stored,
        is_adapter=opened.kind == "adapter",
        inputs=inputs.words,
        device=device,
        trials=trials,
        needed=describe(needed) if needed else "",
        failed_in=_failed_in(plan, stored) if needed else "",
    )
    if needed:
        found = replace(found, trials=(*trials, _under_plan(found, plan, inputs, logits)))
    chosen, reason = _chosen(found, wanted)
    if not chosen:
        return replace(found, reason=reason)
    return _written(found, opened, chosen, inputs.batches, logits[chosen])


def _format_named(dtype: str | None) -> str | None:
    given = BY_SHORT_NAME.get(dtype or "", dtype)
    if given is not None and given not in FORMATS:
        raise unknown("format to export in", given, FORMATS)
    return given


def _require_free(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        raise NanstopError(
            f"no such checkpoint folder: {folder}",
            hint="the folder that `save_pretrained` or a trainer wrote",
        )
    if out.exists() or out.is_symlink():
        raise NanstopError(f"{out} is there already", hint="give a folder that is not")
    if out.resolve().is_relative_to(folder.resolve()):
        raise NanstopError(f"{out} would lie inside the checkpoint", hint="give another folder")


def _stored(opened: Checkpoint) -> str:
    """Return the floating format that most values of a checkpoint are stored in."""
    counts: Counter[str] = Counter()
    for one in opened.tensors:
        if one.dtype is not None and one.dtype.is_floating_point:
            counts[one.dtype_name] += torch.Size(one.shape).numel()
    if not counts:
        raise NanstopError(f"{opened.path}: holds no floating point weights")
    return counts.most_common(1)[0][0]


def _device(opened: Checkpoint) -> str:
    """Return "cuda" where the model has room there in float32, else "cpu"."""
    if torch.cuda.is_available():
        needed = sum(torch.Size(one.shape).numel() for one in opened.tensors) * 4
        if torch.cuda.mem_get_info()[0] > 1.3 * needed:
            return "cuda"
    return "cpu"


def _trials(
    folder: Path, inputs: Inputs, device: str
) -> tuple[tuple[FormatTrial, ...], dict[str, tuple[Tensor, ...]]]:
    """Return a trial of each format, and the logits of those that ran, by format."""
    trials: list[FormatTrial] = []
    logits: dict[str, tuple[Tensor, ...]] = {}
    for name in FORMATS:
        trial, given = tried(folder, getattr(torch, name), inputs.batches, device=device)
        logits[name] = given
        trials.append(_compared(trial, given, logits["float32"]))
    return tuple(trials), logits


def _under_plan(
    found: Export, plan: PrecisionPlan, inputs: Inputs, logits: dict[str, tuple[Tensor, ...]]
) -> FormatTrial:
    """Return a trial of the format that the run failed in, under the remedies of its plan."""
    forward = replace(plan, remedies=of_the_forward(plan.remedies))
    dtype = getattr(torch, found.failed_in)
    trial, given = tried(
        Path(found.folder), dtype, inputs.batches, device=found.device, plan=forward
    )
    return _compared(trial, given, logits["float32"])


def _compared(trial: FormatTrial, logits: Sequence[Tensor], exact: Sequence[Tensor]) -> FormatTrial:
    bad = not trial.finite or any(not bool(one.isfinite().all()) for one in exact)
    if trial.problem or not exact or bad:
        return trial
    return replace(trial, distance=distance(logits, exact))


def _failed_in(plan: PrecisionPlan, stored: str) -> str:
    """Return the half format that a run under these remedies was in."""
    outer = [one.value for one in plan.remedies if one.remedy == "outer_autocast"]
    return next(iter(outer), stored if stored in ("float16", "bfloat16") else "float16")


def _chosen(found: Export, wanted: str | None) -> tuple[str, str]:
    """Return the format to write, or "" and why there is none."""
    trials = {one.dtype: one for one in found.trials if not one.under_plan}
    if wanted is not None:
        trial = trials[wanted]
        if trial.finite:
            return wanted, ""
        return "", f"it is not finite in {wanted}" if not trial.problem else trial.problem
    order = dict.fromkeys((found.stored, "bfloat16", "float32"))
    for name in order:
        trial = trials.get(name)
        if trial is None or not trial.finite or name == found.failed_in:
            continue
        if trial.distance is None or trial.distance <= FAR:
            return name, ""
    if not trials["float32"].finite and not trials["float32"].problem:
        return "", "it is not finite in float32 either: its weights themselves are broken"
    return "", "there is no format that it was seen to be finite in"


def _written(
    found: Export,
    opened: Checkpoint,
    dtype: str,
    batches: Sequence[ModelInput],
    logits: Sequence[Tensor],
) -> Export:
    def check(place: Path) -> None:
        trial, given = tried(place, getattr(torch, dtype), batches, device=found.device)
        same = len(given) == len(logits) and all(map(torch.equal, given, logits))
        if trial.problem or not same:
            raise NanstopError(
                f"what was written does not compute what {found.folder} does "
                f"({trial.problem or 'other logits'}); it was taken away again"
            )

    rest = "That is the format to load its base in.\n" if found.is_adapter else ""
    card = _CARD.format(dtype=dtype, inputs=" and ".join(found.inputs), rest=rest)
    # peft computes an adapter in float32 on a base of any format: it is written as it is.
    cast = None if found.is_adapter else getattr(torch, dtype)
    made = write(opened, Path(found.out), cast, card=card, check=check)
    return replace(
        found,
        dtype=dtype,
        num_bytes=made.num_bytes,
        rounded=made.rounded,
        left_out=tuple(made.left_out),
    )
