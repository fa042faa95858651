"""What ``nanstop check`` looks at.

The facts of a run that is about to begin, and a probe of its first window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nanstop.commands.check.result import Preflight
from nanstop.errors import NanstopError
from nanstop.process.inject.dry_run_child import Target
from nanstop.records import Probe, RunFacts, TextFacts
from nanstop.session.machine import environment

_NO_GRADIENT = "does not require grad"
"""In what autograd raises for a loss that no trainable parameter leads to."""


def run(target: Target, options: Mapping[str, Any]) -> Preflight:
    """Return what is to be seen of a script's target.

    The findings are drawn from it by the process above.
    """
    if options.get("static"):
        return look(target.facts)
    return look(target.facts, trainer=target.trainer, train=target.train, step=target.step)


def look(
    facts: RunFacts,
    *,
    trainer: Any = None,
    train: Callable[[], Any] | None = None,
    step: Any = None,
) -> Preflight:
    """Return facts, machine and, where there is a window to look at, its probe; no findings yet.

    ``trainer``: its ``train()``, or ``train`` with the arguments of the user, runs up to the first
    update and is undone. ``step``: a window at hand. Neither: nothing is run. What raises becomes a
    failure: the facts stand.
    """
    began = time.perf_counter()
    seen = Preflight(facts=facts, environment=environment(import_torch=True))
    try:
        if trainer is not None:
            from nanstop.hosts.trainer.first_window import first_step

            job = partial(_look_at_all, trainer, facts)
            found, seen_facts = first_step(trainer, job, train=train)
            seen = _with(replace(seen, facts=seen_facts), found)
        elif step is not None:
            seen = _with(seen, _probe(step))
    except NanstopError as error:
        seen = replace(seen, failures=(f"not probed: {error.message}",))
    except (
        Exception
    ) as error:  # the user's own code, or memory: the facts are worth having without it
        said = " ".join(str(error).split())[:300]
        seen = replace(seen, failures=(f"the first step raises {type(error).__name__}: {said}",))
        seen = _without_gradient(seen) if _NO_GRADIENT in said else seen
    return replace(seen, seconds=time.perf_counter() - began)


def _probe(step: Any) -> Probe:
    from nanstop.detect.early_steps import at_once
    from nanstop.measure.probe import probe

    found = probe(step)
    try:
        seen = at_once(step)
        return replace(found, **(seen | ({"coarse": found.coarse} if found.coarse else {})))
    except Exception as error:  # the user's own code runs in there
        said = str(error).partition("\n")[0] or type(error).__name__
        return replace(found, problems=(*found.problems, f"the objective: {said}"))


def _look_at_all(trainer: Any, facts: RunFacts, step: Any) -> tuple[Probe, RunFacts]:
    from nanstop.detect.first_rows import count
    from nanstop.hosts.trainer.first_window import probed_accumulation

    found, sums = _probe(step), probed_accumulation(trainer, step)
    try:  # its own collator, in the order of the training; what it draws is undone
        data = count(trainer.get_train_dataloader(), step.view, facts.text or TextFacts())
    except Exception as error:  # the user's own code runs in there
        said = f"the first rows: {type(error).__name__}"
        return replace(found, problems=(*found.problems, said)), replace(facts, accumulation=sums)
    return found, replace(facts, accumulation=sums, data=data)


def _with(seen: Preflight, found: Probe) -> Preflight:
    seen = replace(seen, probe=found, failures=tuple(f"not probed: {p}" for p in found.problems))
    cut_off = any(_NO_GRADIENT in problem for problem in found.problems)
    unseen = found.loss is not None and not found.problems and not found.gradients
    return _without_gradient(seen) if cut_off or unseen else seen


def _without_gradient(seen: Preflight) -> Preflight:
    """Return ``seen`` with the fact that the first backward reached nothing."""
    path = seen.facts.gradient_path
    if path is None:
        return seen
    return replace(seen, facts=replace(seen.facts, gradient_path=replace(path, num_reached=0)))
