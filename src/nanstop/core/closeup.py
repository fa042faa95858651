"""A second look at a few ops of a run: full statistics, the same op in a wider format, masks, positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanstop.core import optable
from nanstop.core.numerics import HALF_FORMATS, WIDER, bad_mask, is_measurable, measure
from nanstop.core.rng import note_rng, restore_rng
from nanstop.records import Finiteness, Position, TensorStats

_ATTENTION = "scaled_dot_product"
_MASK_FRACTION = 0.25
"""A finite operand below this share of its format's lowest value is a mask, not a score."""


@dataclass(frozen=True, slots=True)
class CloseUp:
    """Full facts of one op. ``legal``: why its infinity is meant to be there, else None."""

    inputs: tuple[TensorStats, ...]
    outputs: tuple[TensorStats, ...]
    wider: Finiteness
    reference: Finiteness
    fully_masked_rows: int
    legal: str | None
    positions: tuple[Position, ...] | None
    bad_lanes: tuple[int, ...]


class Observer:
    """Passed to the recorder of a second pass; keeps a ``CloseUp`` of each op in ``wanted``. Synchronises the device.

    ``ids_shape``: [batch, tokens] of the micro-batch, to say which samples and tokens an op's bad elements belong to.
    """

    def __init__(
        self,
        wanted: frozenset[int],
        names: Mapping[int, str],
        ids_shape: tuple[int, ...] | None,
        weight_shapes: frozenset[tuple[int, ...]],
    ) -> None:
        self.seen: dict[int, CloseUp] = {}
        self.op_names: dict[int, str] = {}
        self._wanted = wanted
        self._names = names
        self._ids_shape = ids_shape
        self._weight_shapes = weight_shapes

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if index not in self._wanted:
            return None
        self.op_names[index] = str(func)
        traits = optable.traits(func)
        read = [
            tensor
            for position, _, tensor in optable.tensors(args, kwargs)
            if position not in traits.overwritten
        ]
        before = tuple(measure(t, self._names.get(t.untyped_storage()._cdata)) for t in read)
        masked = fully_masked_rows(read)
        legal_operand = _mask_operand(func, read)
        kept = [t.clone() for t in read] if traits.mutated else read
        kept_args = _replace(args, dict(zip(map(id, read), kept, strict=True)))
        # An op that raises leaves no result to look at; its operands are what there is to say.
        self.seen[index] = CloseUp(before, (), "unknown", "unknown", masked, None, None, ())

        def done(result: Any) -> None:
            outputs = _results(func, args, kwargs, result)
            bad = [bad_mask(o) if is_measurable(o) else None for o in outputs]
            self.seen[index] = CloseUp(
                inputs=before,
                outputs=tuple(
                    measure(o, self._names.get(o.untyped_storage()._cdata)) for o in outputs
                ),
                wider=rerun_wider(func, kept_args, kwargs, bad),
                reference=rerun_reference(func, kept_args, kwargs, bad),
                fully_masked_rows=masked,
                legal=legal_operand,
                positions=self._positions(bad),
                bad_lanes=tuple(
                    lane for lane, mask in enumerate(bad) if mask is not None and bool(mask.any())
                ),
            )

        return done

    def _positions(self, bad: list[Tensor | None]) -> tuple[Position, ...] | None:
        mask = next((m for m in bad if m is not None and bool(m.any())), None)
        if mask is None or self._ids_shape is None or tuple(mask.shape) in self._weight_shapes:
            return None
        return positions_of(mask, self._ids_shape)


def positions_of(mask: Tensor, ids_shape: tuple[int, ...]) -> tuple[Position, ...] | None:
    """Return samples and token spans of the True elements, or None where the axes are not those of the batch.

    Axes understood: [batch, tokens, ...], [batch, heads, tokens, ...], [batch * tokens, ...], [batch].
    """
    rows, tokens = ids_shape
    shape = tuple(mask.shape)
    if shape[:2] == (rows, tokens):
        grid = mask.reshape(rows, tokens, -1).any(-1)
    elif len(shape) == 4 and shape[0] == rows and shape[2] == tokens:
        grid = mask.transpose(1, 2).reshape(rows, tokens, -1).any(-1)
    elif shape[:1] == (rows * tokens,) and rows * tokens > rows:
        grid = mask.reshape(rows, tokens, -1).any(-1)
    elif shape == (rows,):
        return tuple(Position(sample=int(r)) for r in mask.nonzero().flatten())
    else:
        return None
    found = []
    for row in grid.any(-1).nonzero().flatten().tolist():
        where = grid[row].nonzero().flatten()
        found.append(
            Position(sample=row, first_token=int(where.min()), last_token=int(where.max()))
        )
    return tuple(found)


def fully_masked_rows(operands: list[Tensor]) -> int:
    """Return how many rows (last axis) of an operand are all -inf or all at the lowest value of their format."""
    count = 0
    for tensor in operands:
        if not is_measurable(tensor) or tensor.dim() < 2 or tensor.shape[-1] < 2:
            continue
        count = max(count, int((tensor == float("-inf")).all(-1).sum()))
    return count


def _mask_operand(func: Any, operands: list[Tensor]) -> str | None:
    """Return why an infinity that this op makes is meant: it adds or casts a mask."""
    base = optable.base_name(str(func))
    if base not in ("add", "add_", "sub", "_to_copy", "masked_fill", "masked_fill_", "where"):
        return None
    for tensor in operands:
        if is_measurable(tensor):
            lowest = torch.finfo(tensor.dtype).min
            if bool((tensor <= lowest * _MASK_FRACTION).any()):
                return "an additive mask at the lowest value of its format"
    return None


def rerun_wider(
    func: Any, args: Any, kwargs: Mapping[str, Any], bad: list[Tensor | None]
) -> Finiteness:
    """Return whether the op, on the same inputs in a wider format, is finite where its result was not."""
    formats = {t.dtype for _, _, t in optable.tensors(args, kwargs) if t.is_floating_point()}
    formats |= {value for value in kwargs.values() if isinstance(value, torch.dtype)}
    half = bool(formats & set(HALF_FORMATS))

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(_wide(value.dtype, half)) if is_measurable(value) else value
        if isinstance(value, torch.dtype):
            return _wide(value, half)
        if isinstance(value, list | tuple):
            return type(value)(widen(item) for item in value)
        return value

    def run() -> list[Tensor]:
        wide_args = tuple(widen(a) for a in args)
        wide_kwargs = {k: widen(v) for k, v in kwargs.items()}
        return _results(func, wide_args, wide_kwargs, func(*wide_args, **wide_kwargs))

    return _verdict(run, bad)


def _wide(dtype: torch.dtype, half: bool) -> torch.dtype:
    if half:
        return torch.float32 if dtype in HALF_FORMATS else dtype
    return WIDER.get(dtype, dtype)


def rerun_reference(
    func: Any, args: Any, kwargs: Mapping[str, Any], bad: list[Tensor | None]
) -> Finiteness:
    """Return whether reference mathematics in the same format is finite: attention opened into its parts."""
    name = str(func)
    if _ATTENTION not in name or "backward" in name:
        return "unknown"
    query, key, value = args[:3]
    mask = kwargs.get("attn_mask", kwargs.get("attn_bias"))
    causal = any(a is True for a in args[3:]) or bool(kwargs.get("is_causal", False))

    def run() -> list[Tensor]:
        scale = kwargs.get("scale")
        math = torch.ops.aten._scaled_dot_product_attention_math
        return [math(query, key, value, mask, 0.0, causal, scale=scale)[0]]

    return _verdict(run, bad[:1])


def _verdict(run: Callable[[], list[Tensor]], bad: list[Tensor | None]) -> Finiteness:
    state = note_rng()
    try:
        with torch.no_grad():
            outputs = run()
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
        return "unknown"  # the op has no such form; nothing can be said
    finally:
        restore_rng(state)
    looked = False
    for output, mask in zip(outputs, bad, strict=False):
        if mask is None or not is_measurable(output) or output.shape != mask.shape:
            continue
        looked = True
        if bool((bad_mask(output) & mask).any()):
            return "nonfinite"
    return "finite" if looked else "unknown"


def _results(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
    mutated = optable.traits(func).mutated
    written = [t for p, _, t in optable.tensors(args, kwargs) if p in mutated]
    return written or [t for _, _, t in optable.tensors(_as_tuple(result), {})]


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _replace(args: Any, copies: Mapping[int, Tensor]) -> tuple[Any, ...]:
    return tuple(
        [copies.get(id(item), item) for item in arg]
        if isinstance(arg, list | tuple)
        else copies.get(id(arg), arg)
        for arg in args
    )
