"""The state of an optimizer, and moments in it that no update can have made:
restored from another run, or from damaged memory.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.numerics.tensors import floats, has_bad, is_inexact, spread
from nanstop.records import StateFault

_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "momentum_buffer", "exp_inf"}
)
MAX_LISTED = 16
MOST_LIKE, MOST_FITTED, LEAST_FITTED = 16, 4096, 256
BETTER_FIT, BY_CHANCE = 0.15, 0.06
"""Of a correlation; the second of one of 256 elements that have nothing in common."""
FAR_OFF, AGREES = 2.0 * math.log(8.0), 2.0 * math.log(2.0)
"""Of squared sizes, as logarithms. On the same data parameters are within 1.4 of each other, on
other data some are 10 apart, as no other order of the same moments explains.
"""
LEAST_MIXED = 4
"""Two may have changed their parts in the loss."""
_SMALLEST_MOVED = 1e-15
"""First moments beyond this have squares that float32 holds."""


@torch.no_grad()
def moments_of_others(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]
) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Return how many parameters were compared, and pairs of names: a parameter, and the one of its
    shape whose second moments fit its gradient far better than its own do.

    Which elements of a gradient are large is much the same from window to window: squares of the
    present one go with the sums of earlier ones. So does how large it is beside those of other
    parameters, which tells where elements do not. Looks at ``MOST_LIKE`` parameters of each shape,
    up to ``MOST_FITTED`` elements of each; synchronises the device a few times for each
    shape.
    """
    groups: dict[torch.Size, list[tuple[str, Tensor, Tensor]]] = {}
    for name, parameter in named:
        squares = _squares(parameter, optimizer.state.get(parameter, {}))
        gradient = parameter.grad
        if squares is None or gradient is None or gradient.is_sparse:
            continue
        if parameter.numel() >= LEAST_FITTED and bool(gradient.any()):
            groups.setdefault(parameter.shape, []).append((name, gradient, squares))
    alike = [group[:MOST_LIKE] for group in groups.values() if len(group) > 1]
    pairs: list[tuple[str, str]] = []
    ratio = _usual_ratio(list(groups.values()))
    for group in alike:
        fit = _fits([g.square() for _, g, _ in group], [squares for _, _, squares in group])
        best = fit.argmax(1).tolist()
        better = (fit.amax(1) - fit.diagonal() >= BETTER_FIT).tolist()
        wrong = [place for place, is_better in enumerate(better) if is_better]
        # Each has what another lacks: one alone may have changed by itself.
        changed = {place: best[place] for place in wrong if best[place] in wrong}
        if len(set(changed.values())) < len(changed):
            changed = {}
        changed = changed or _mixed_by_size(group, fit, ratio)
        pairs += [(group[place][0], group[other][0]) for place, other in changed.items()]
    return sum(map(len, alike)), tuple(pairs)


Group = Sequence[tuple[str, Tensor, Tensor]]


def _log_sizes(group: Group) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the squared sizes of gradients and of second moments, float64 on the
    host.
    """
    gradients = [spread(g, MOST_FITTED).double().square().mean() for _, g, _ in group]
    moments = [spread(squares, MOST_FITTED).double().mean() for _, _, squares in group]
    return torch.stack(gradients).cpu().log(), torch.stack(moments).cpu().log()


def _usual_ratio(groups: Sequence[Group]) -> float:
    """Return by how much the gradients of a window are larger than their moments, as a logarithm:
    it is much the same for all parameters, whichever of a shape has which moments.
    """
    sizes = [_log_sizes(group[:MOST_LIKE]) for group in groups]
    ranked = [gradients.sort()[0] - moments.sort()[0] for gradients, moments in sizes]
    return float(torch.cat(ranked).median()) if ranked else 0.0


def _mixed_by_size(group: Group, fit: Tensor, ratio: float) -> dict[int, int]:
    """Return which parameter of a shape has the moments that each should have, empty where sizes do
    not show that: those of ``LEAST_MIXED`` or more are far off their gradients', while in another
    order all agree, and element by element they fit no worse but by chance.
    """
    gradients, moments = _log_sizes(group)
    own = (gradients - moments - ratio).abs() > FAR_OFF
    ranked = (gradients.sort()[0] - moments.sort()[0] - ratio).abs()
    if int(own.sum()) < LEAST_MIXED or bool((ranked > AGREES).any()):
        return {}
    fits = (gradients[:, None] - moments - ratio).abs() <= AGREES
    best = fit.masked_fill(~fits, -math.inf).argmax(1)
    better = fit.gather(1, best[:, None])[:, 0] - fit.diagonal()
    if not bool(fits.any(1).all()) or float(better[own].mean()) < -BY_CHANCE:
        return {}
    return {int(place): int(best[place]) for place in own.nonzero()}


def _squares(parameter: Tensor, entries: Any) -> Tensor | None:
    """Return what an optimizer keeps of the squares of a parameter's gradients, None without."""
    for value in entries.values() if isinstance(entries, Mapping) else ():
        like = isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() > 1
        if like and value.is_floating_point() and bool((value >= 0).all()) and bool(value.any()):
            return value
    return None


def _fits(gradients: list[Tensor], moments: list[Tensor]) -> Tensor:
    """Return the correlation of the logarithms of each with each, [gradients, moments]."""
    sizes = [torch.stack([_log(one) for one in group]) for group in (gradients, moments)]
    apart = [size - size.mean(1, keepdim=True) for size in sizes]
    one, other = (size / size.norm(dim=1, keepdim=True).clamp(min=1e-12) for size in apart)
    return (one @ other.T).cpu()


def _log(values: Tensor) -> Tensor:
    flat = spread(values, MOST_FITTED).float()
    above = flat[flat > 0]
    return flat.clamp(min=float(above.amin()) if above.numel() else 1.0).log()


@torch.no_grad()
def state_faults(
    optimizer: Optimizer | None,
    named: Iterable[tuple[str, Tensor]],
    squares: Container[str] = (),
) -> tuple[StateFault, ...]:
    """Return what is wrong with an optimizer's state, MAX_LISTED at most;
    ``named``: the model's parameters, ``squares``: entries that are nowhere below zero.

    Packed (integer) states are not looked into. Reads every value up to three times (0.2 ns each),
    those of a second moment that holds a zero once more (25 ns), and synchronises as often; an
    optimizer that has not stepped yet has none.
    """
    state = getattr(
        optimizer, "state", None
    )  # engines hand out objects that only look like optimizers
    if not state:
        return ()
    names = {id(parameter): name for name, parameter in named}
    # Others keep moments of a projection, or of a part.
    whole = type(innermost(optimizer)) in vars(torch.optim).values()
    found: list[StateFault] = []
    for parameter, entries in state.items():
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, Tensor) and len(found) < MAX_LISTED:
                name = f"{names.get(id(parameter), '?')}:{key}"
                found += _misshapen(name, key, value, parameter) if whole else ()
                fault = _impossible(name, value, is_square=key in squares)
                found += fault or _vanished(name, key, value, entries)
    return tuple(found)


def _misshapen(name: str, key: str, value: Tensor, parameter: Tensor) -> list[StateFault]:
    if key not in _LIKE_PARAMETER or value.shape == parameter.shape:
        return []
    detail = f"{list(value.shape)} for a parameter of {list(parameter.shape)}"
    return [StateFault(name=name, kind="shape", detail=detail)]


def _impossible(name: str, value: Tensor, *, is_square: bool) -> list[StateFault]:
    if not is_inexact(value) or value.device.type == "meta":
        return []
    parts = list(floats(value))
    if has_bad(value):
        num_bad = sum(int((~part.isfinite()).sum()) for part in parts)
        return [StateFault(name=name, kind="nonfinite", num_bad=num_bad)]
    if not is_square or not any(bool(part.amin() < 0) for part in parts):
        return []
    num_negative = sum(int((part < 0).sum()) for part in parts)
    return [StateFault(name=name, kind="negative", num_bad=num_negative)]


def _vanished(name: str, key: str, value: Tensor, entries: Mapping[str, Any]) -> list[StateFault]:
    """Return the second moments of a wide format that are 0 although the first are not:
    they were kept in a narrow one.
    """
    first = entries.get("exp_avg")
    wide = value.dtype in (torch.float32, torch.float64)
    if key != "exp_avg_sq" or not wide or not isinstance(first, Tensor):
        return []
    if first.shape != value.shape or value.device.type == "meta" or not value.numel():
        return []
    if value.amin() > 0:  # in nearly all states
        return []
    moved = first.abs() > _SMALLEST_MOVED
    num_lost = int((moved & (value == 0)).sum())
    lost = num_lost > 0.1 * int(moved.sum())
    return [StateFault(name=name, kind="vanished", num_bad=num_lost)] if lost else []


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that holds the moments of the weights: below accelerate's wrapper, and
    below one that the script wraps around another (Lookahead).
    """
    while isinstance(inner := getattr(optimizer, "__dict__", {}).get("optimizer"), Optimizer):
        optimizer = inner
    return optimizer
