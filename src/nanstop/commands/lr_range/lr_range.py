"""``nanstop lr-range``: a learning-rate range test on the training of an unchanged script, in a
child process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanstop.commands.lr_range.curve import LrRange, analyse, rates
from nanstop.commands.lr_range.result import Sweep
from nanstop.errors import NanstopError
from nanstop.process.inject.dry_run import dry_run
from nanstop.process.inject.progress import Follow
from nanstop.records.codec import to_json
from nanstop.session.factory import incident_folder
from nanstop.store.files import write_whole

RESULT = "lr_range.json"

_BY_HAND = f"{__package__}.sweep.sweep(step, model, optimizer) tests a step of your own"


def lr_range(
    command: Sequence[str],
    *,
    low: float = 1e-7,
    high: float = 1.0,
    steps: int = 100,
    folder: str | os.PathLike[str] | None = None,
    follow: Follow | None = None,
) -> LrRange:
    """Run a script up to its first training, run the sweep in place of it, and return what the
    losses say.

    The child's output goes to standard error, or is followed as ``dry_run`` has it. The result,
    with every rate and loss to plot, is also written as ``lr_range.json`` into the incident folder.
    Errors: ``NanstopError`` NS001 for a plan that is no sweep, a command that cannot be started, a
    folder that cannot be written, or a script that ends before any sweep.
    """
    planned = rates(low, high, steps)
    place = Path(folder or incident_folder()).absolute()
    _require_writable(place)
    options = {"low": low, "high": high, "steps": steps}
    swept = dry_run(command, f"{__package__}.job", Sweep, options=options, follow=follow)
    if swept.problem:
        raise NanstopError(f"this loop cannot be swept: {swept.problem}", hint=_BY_HAND)
    if len(swept.losses) < 2:
        raise _nothing_measured(swept)
    found = analyse(planned, swept.losses[0], swept.losses[1:])
    short = _short(found, len(planned), swept)
    if short:
        found = replace(found, message="; ".join(filter(None, (found.message, short))))
    write_whole(result_file(place), to_json(found).encode())
    return found


def _require_writable(folder: Path) -> None:
    """Find out before the sweep whether its result can be kept."""
    probe = folder / f".lr_range.{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(probe, b"")
        probe.unlink()
    except OSError as error:
        raise NanstopError(f"cannot write {folder}: {error.strerror or error}") from error


def result_file(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return where the result of the last test in this incident folder is."""
    return Path(folder or incident_folder()) / RESULT


def render(found: LrRange, record: str = "") -> str:
    """Return the outcome as text: the range and what it rests on."""
    if found.status == "found":
        falls = f"begins to fall at {found.begins:.1e}, falls fastest at {found.steepest:.1e}"
        least, first = f"{found.lowest_loss:.4g}", f"{found.first_loss:.4g}"
        lines = [
            f"learning rate: {found.low:.1e} to {found.high:.1e}",
            f"  the loss {falls}",
            f"  it is least at {found.lowest:.1e}: {least}, from {first}",
            f"  noise of one loss: {found.noise:.2g}",
        ]
        lines += [f"note: {found.message}"] if found.message else []
    else:
        lines = [f"not established: {found.message}"]
    if found.diverges is not None:
        lines.append(f"  it diverges at {found.diverges:.1e}")
    elif found.rates:
        lines.append(f"  it does not diverge up to {found.rates[-1]:.1e}")
    lines.append(f"  {len(found.losses)} steps, one rate each; weights were thrown away")
    return "\n".join([*lines, *([f"  plot data: {record}"] if record else [])])


def _short(found: LrRange, num_planned: int, swept: Sweep) -> str:
    """Return why a sweep ended before its last rate, where it did not diverge."""
    if swept.ended:
        return f"the script's training ended on the way: {swept.ended}"
    if len(found.losses) < num_planned and found.diverges is None:
        return f"the script's training ended after {len(found.losses)} of {num_planned} steps"
    return ""


def _nothing_measured(swept: Sweep) -> NanstopError:
    if swept.ended:
        hint = "what it wrote stands above; run it without nanstop to see whether it trains"
        after = f"after {len(swept.losses)} steps" if swept.losses else "at its first step"
        return NanstopError(f"the script's training ended {after}: {swept.ended}", hint=hint)
    return NanstopError("the script's training has one step only: a sweep takes one for each rate")
