"""``nanstop lr-range``: a learning-rate range test on the training of an unchanged script, in a child process."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nanstop.commands.lr_range.curve import LrRange, analyse, rates
from nanstop.commands.run.launch import resolve_command, watching
from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.records.codec import to_json
from nanstop.session.factory import incident_folder
from nanstop.store.files import read_text, write_whole

VARIABLE = "NANSTOP_LR_RANGE"
"""Environment variable with a ``SweepPlan`` as JSON; set, a script's first training becomes the sweep."""

RESULT = "lr_range.json"

_STDERR = 2
_NO_TRAINING = (
    "nanstop waits for train() of a transformers or TRL trainer, or for a loop's optimizer steps"
)
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """Rates from ``low`` to ``high`` in ``steps`` optimizer steps; ``out``: the file that the losses go to."""

    low: float = 1e-7
    high: float = 1.0
    steps: int = 100
    out: str = ""


def lr_range(
    command: Sequence[str],
    *,
    low: float = 1e-7,
    high: float = 1.0,
    steps: int = 100,
    folder: str | os.PathLike[str] | None = None,
) -> LrRange:
    """Run a script up to its first training, run the sweep in place of it, and return what the losses say.

    The child's output goes to standard error. The result, with every rate and loss to plot, is also written as
    ``lr_range.json`` into the incident folder. Errors: ``NanstopError`` NS001 for a plan that is no sweep, a command
    that cannot be started, a folder that cannot be written, or a script that ends before any sweep.
    """
    planned = rates(low, high, steps)
    resolved = resolve_command(command)
    place = Path(folder or incident_folder()).absolute()
    measured = place / f".lr_range.{secrets.token_hex(4)}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_whole(measured, b"{}")
    except OSError as error:
        raise NanstopError(f"cannot write {place}: {error.strerror or error}") from error
    try:
        plan = SweepPlan(low=low, high=high, steps=steps, out=str(measured))
        code = _run(resolved, plan, place)
        said = json.loads(read_text(measured, _MAX_BYTES))
    finally:
        measured.unlink(missing_ok=True)
    if said.get("problem"):
        raise NanstopError(f"this loop cannot be swept: {said['problem']}", hint=said["hint"])
    losses = [float(each) for each in said.get("losses", ())]
    if len(losses) < 2:
        raise _nothing_measured(code, losses)
    found = analyse(planned, losses[0], losses[1:])
    short = _short(found, len(planned), code)
    if short:
        found = replace(found, message="; ".join(filter(None, (found.message, short))))
    write_whole(result_file(place), to_json(found).encode())
    return found


def result_file(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return where the result of the last test in this incident folder is."""
    return Path(folder or incident_folder()) / RESULT


def render(found: LrRange, record: str = "") -> str:
    """Return the outcome as text: the range and what it rests on."""
    if found.status == "found":
        lines = [
            f"learning rate: {found.low:.1e} to {found.high:.1e}",
            f"  the loss begins to fall at {found.begins:.1e}, falls fastest at {found.steepest:.1e}",
            f"  it is least at {found.lowest:.1e}: {found.lowest_loss:.4g}, from {found.first_loss:.4g}",
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


def _run(command: Sequence[str], plan: SweepPlan, folder: Path) -> int:
    """Run the child to its end and return its exit code. Its own watch is off: nothing is repaired in a sweep."""
    variables = watching(Policy(on_failure="observe"), folder, secrets.token_hex(8), _python_path())
    quiet = {"WANDB_MODE": "disabled", VARIABLE: json.dumps(asdict(plan))}
    own = {name: value for name, value in os.environ.items() if name != "NANSTOP"}
    try:
        return subprocess.run(
            command, env=own | variables | quiet, stdout=_STDERR, check=False
        ).returncode
    except OSError as error:
        raise NanstopError(f"cannot start {command[0]}: {error.strerror or error}") from error


def _python_path() -> str:
    return os.environ.get("PYTHONPATH", "")


def _short(found: LrRange, num_planned: int, code: int) -> str:
    """Return why a sweep ended before its last rate, where it did not diverge."""
    if code:
        return f"the script ended with exit code {code} on the way"
    if len(found.losses) < num_planned and found.diverges is None:
        return f"the script's training ended after {len(found.losses)} of {num_planned} steps"
    return ""


def _nothing_measured(code: int, losses: list[float]) -> NanstopError:
    if code:
        hint = "what it wrote stands above; run it without nanstop to see whether it trains"
        after = f"after {len(losses)} steps" if losses else "before the sweep could begin"
        return NanstopError(f"the script ended with exit code {code} {after}", hint=hint)
    if losses:
        return NanstopError(
            "the script's training has one step only: a sweep takes one for each rate"
        )
    return NanstopError("the script ended without training", hint=_NO_TRAINING)
