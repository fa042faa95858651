"""An overflow planted into a model, and whether nanstop names the module where it began.

The truth about a plant comes from hooks on every module and from nothing of nanstop: the first
module whose output is not finite although what it was given was, or the module around the first one
that is given something not finite.
"""

from __future__ import annotations

import math
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from architectures_trials import FORMS, LR, Batch, Loss, batches, objective, short
from torch import Tensor, nn

import nanstop

_IN_LAYER = re.compile(r"(.*?\.(\d+))\.")
_PLANTS_TRIED = 16
_OVER = 1.5
"""How far beyond its format's largest number a plant drives an output."""


@dataclass
class Plant:
    """A planted overflow. ``truth``: the module whose op first gave something not finite;
    ``found``: nanstop's answer.
    """

    form: str
    seed: int
    parameter: str = ""
    truth: str = ""
    found: str = ""
    op: str = ""
    line: str = ""
    kind: str = ""
    reason: str = ""

    @property
    def exact(self) -> bool:
        return bool(self.truth) and self.truth == self.found


def planted(make: Callable[[], nn.Module], form: str, seed: int) -> Plant:
    """Return how nanstop localizes an overflow planted into a layer drawn with ``seed``."""
    weights, autocast = FORMS[form]
    plant = Plant(form=form, seed=seed)
    batch = batches(1, seed)[0]
    model = make().to(weights)
    try:
        usual = witness(model, objective(model, autocast), batch)
    except Exception as error:  # a model may have no such form
        plant.reason = f"does not run in {form}: {short(error)}"
        return plant
    if usual.failed:
        plant.reason = f"fails in {form} without a plant"
        return plant
    reach = _OVER * torch.finfo(autocast or weights).max
    for parameter, factor in candidates(make(), batch, seed, reach):
        model = damaged(make(), parameter, factor).to(weights)
        seen = witness(model, objective(model, autocast), batch, usual.exempt)
        if seen.failed and seen.module is not None:
            plant.parameter, plant.truth = parameter, seen.module
            break
    else:
        plant.reason = "no plant made the loss or a gradient fail"
        return plant
    model = damaged(make(), parameter, factor).to(weights)
    _localized(model, objective(model, autocast), batch, plant)
    return plant


def _localized(model: nn.Module, loss_of: Loss, batch: Batch, plant: Plant) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    policy = nanstop.Policy(on_failure="observe", budget_trials=1, budget_seconds=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        nanstop.watch(model, optimizer, policy=policy, out=folder) as watch,
        suppress(Exception),  # of the model's own: an overflow may end in one
    ):
        watch.step(loss_of, batch)
        watch.update()
    places = [r.localization for r in watch.incidents if r.localization is not None]
    if not places:
        plant.reason = "not localized" if watch.incidents else "no incident"
        return
    event = places[0].first_bad
    plant.found, plant.op, plant.kind = places[0].key.module, places[0].key.op, places[0].key.kind
    plant.line = event.source.text if event is not None and event.source is not None else ""


def damaged(model: nn.Module, parameter: str, factor: float) -> nn.Module:
    """Return the model with one parameter scaled."""
    with torch.no_grad():
        weight = model.get_parameter(parameter)
        weight.copy_(weight.double() * factor)
    return model


def candidates(
    model: nn.Module, batch: Batch, seed: int, reach: float
) -> Iterator[tuple[str, float]]:
    """Yield (parameter, factor), drawn:
    a layer, then a module of it, whose output the factor drives to ``reach``.
    """
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        inside = _IN_LAYER.match(name + ".")
        own = dict(module.named_parameters(recurse=False))
        if inside and any(p.is_floating_point() for p in own.values()):
            layers.setdefault(inside[1], []).append(name)
    sizes = output_sizes(model, batch)
    draw = random.Random(seed)
    for _ in range(_PLANTS_TRIED):
        name = draw.choice(layers[draw.choice(sorted(layers))])
        own = dict(model.get_submodule(name).named_parameters(recurse=False))
        choice = "weight" if "weight" in own else draw.choice(sorted(own))
        largest = float(own[choice].detach().abs().max())
        factor = reach / sizes.get(name, math.inf) if sizes.get(name) else 0.0
        if factor > 1 and largest * factor < reach / _OVER:
            yield f"{name}.{choice}", factor


def output_sizes(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the largest number of each module's output, by module name."""
    sizes: dict[str, float] = {}

    def note(name: str, output: Any) -> None:
        largest = [float(t.detach().abs().max()) for t in floats_in(output) if t.numel()]
        sizes[name] = max([sizes.get(name, 0.0), *largest])

    handles = [
        module.register_forward_hook(lambda _m, _a, out, name=name: note(name, out))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        objective(model)(batch)
    for handle in handles:
        handle.remove()
    return sizes


Key = tuple[str, int, str, int]


@dataclass
class Witness:
    """``module``: where the first value that is not finite was made;
    ``exempt``: places where one was met in health.
    """

    module: str | None = None
    failed: bool = False
    exempt: frozenset[Key] = frozenset()


def witness(
    model: nn.Module, loss_of: Loss, batch: Batch, exempt: frozenset[Key] = frozenset()
) -> Witness:
    """Run forward and backward with a hook on every module, and return where non-finite values
    begin.

    A mask of -inf that a healthy model passes from module to module is no failure:
    ``exempt`` says where it is met.
    """
    met: set[Key] = set()
    found = Witness()
    torch.manual_seed(1)
    try:
        with _hooked(model, met, found, exempt):
            loss = loss_of(batch)
            loss.backward()
    except Exception:
        if found.module is None:
            raise
        found.failed = True  # what the model raised on what is not finite
        return found
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found.failed = not all(bool(t.isfinite().all()) for t in (loss.detach(), *gradients))
    found.exempt = frozenset(met)
    model.zero_grad()
    return found


@contextmanager
def _hooked(
    model: nn.Module, met: set[Key], found: Witness, exempt: frozenset[Key]
) -> Iterator[None]:
    """Hook every module inside; a hook for what left is called where the forward raised, too."""
    stack: list[str] = []
    calls: dict[str, int] = {}

    def look(name: str, side: str, values: Any, owner: str) -> None:
        for place, tensor in enumerate(floats_in(values)):
            if not bool(tensor.detach().isfinite().all()):
                key = (name, calls[name], side, place)
                met.add(key)
                if key not in exempt and found.module is None:
                    found.module = owner

    def entered(name: str, args: Any, kwargs: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        look(name, "in", (args, kwargs), stack[-1] if stack else "")
        stack.append(name)

    def left(name: str, output: Any) -> None:
        stack.pop()
        look(name, "out", output, name)

    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(
                lambda _m, args, kwargs, name=name: entered(name, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(
                lambda _m, _a, output, name=name: left(name, output), always_call=True
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def floats_in(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of nested arguments or outputs."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from floats_in(value)
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from floats_in(value)
