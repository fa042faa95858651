"""What is said of a run while it goes on: of its numbers, and of an investigation under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nanstop.frozen import frozen
from nanstop.wording import counted, number

_STAGES = {
    "capture": "taking hold of the failing step",
    "batch": "reading the micro-batch",
    "weights": "reading the weights",
    "replay": "running the step again",
    "localization": "looking for the first bad operation",
    "samples": "telling which samples fail",
    "rows": "telling which rows of the data these are",
    "experiment": "making an experiment on the cause",
    "proof": "proving a cure",
}


@frozen(kw_only=True)
class Stage:
    """A stage of an investigation that is under way. ``tried`` of ``trials``; ``best``: the last
    cure that passed, or ""; ``seconds_left``: None where that is not known.
    """

    name: str
    step: int
    tried: int = 0
    trials: int = 0
    best: str = ""
    seconds_left: float | None = None


def stage_lines(stage: Stage) -> Iterator[str]:
    """Yield what a stage is, what it has come to, and how long it may take."""
    yield f"Step {stage.step}: {_STAGES.get(stage.name, stage.name)}"
    if stage.tried and stage.trials:
        tried = f"{counted(stage.tried, 'trial')} of at most {stage.trials}"
        yield f"{tried}; {f'passes so far: {stage.best}' if stage.best else 'none passes'}"
    if stage.seconds_left is not None:
        yield f"at most {stage.seconds_left:.0f} s left"


def progress_line(num_steps: int, numbers: Mapping[str, float]) -> str:
    """Return how a run stands. ``numbers``: by their names in a session's metrics and series."""
    said = [f"{counted(num_steps, 'step')} watched"]
    if (bits := numbers.get("headroom")) is not None:
        past = "values are past the end of their format"
        said.append(f"values can double {number(bits)} times" if bits > 0.0 else past)
    if (scale := numbers.get("scale")) is not None:
        said.append(f"loss scale {number(scale)}")
    if skipped := numbers.get("skipped"):
        said.append(f"{counted(int(skipped), 'update')} skipped")
    return ", ".join(said)
