"""Whether rows have read the very token that they are asked for: a language model without its mask.

Row i is asked for token i + 1. A model whose rows read what comes after them learns to copy it:
the loss falls to 0, and what is generated is nothing of it. A mask of numbers where torch takes one
of booleans does that, which adds 0 and 1 to the scores. Which token a row is asked for is seen in
the numbers of the labels; what it has read, by an experiment: the micro-batch run again, undone,
with other embeddings in the second half of each text. What the first half is asked for is no less
likely by that, of a model that reads forwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.labels import Picks, chances, shift_of
from nanstop.numerics.tensors import is_measurable
from nanstop.records import ObjectiveRow, op_name
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.tracing.op_patches import SecondRun, displace
from nanstop.tracing.operators import outputs_of, takes_memory
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

_LEAST_LENGTH = 8
_CHANGED, _CHANGED_ALONE = 1e-3, 3e-2
"""Of how much rows change that read other numbers themselves, by how much others do at least; of
one text alone, which nothing shows to be no rounding of experts that are given other tokens.
"""
_OWN = 2.0
"""By how much more a row changes than the one before it, where it alone reads another number."""


def reads_ahead(step: Step, picks: Picks) -> tuple[ObjectiveRow, ...]:
    """Return the operation whose rows have read the token that they are asked for.

    Undone bitwise; runs the micro-batch once without its backward where rows are asked for the next
    token, ten times more where something is odd, and not at all elsewhere. Synchronises the device.
    """
    for pick in sorted(picks.labels):
        tables = [n for n, ids in picks.tokens.items() if _is_next(picks.labels[pick], ids)]
        odd = [one for one in tables if _is_read(step, one, pick, picks)]
        if not tables or odd != tables:
            continue
        op, at = first_ops(step)[pick], _first_to_read(step, odd[0], picks.tokens[odd[0]])
        return (
            ObjectiveRow(
                op=op.name,
                module=op.module,
                given="ahead",
                width=op.inputs[0].shape[-1] if op.inputs else 0,
                line=line_text(op.line),
                made_at=(line_text(first_ops(step)[at].line),) if at is not None else (),
            ),
        )
    return ()


def _is_next(labels: Tensor, tokens: Tensor) -> bool:
    """Return whether the rows of each text are asked for the token after their own, and the last
    not for the first, as of a text that is turned round for those who read all of it.
    """
    num_texts, length = tokens.shape
    per_text = labels.numel() // num_texts
    is_whole = labels.numel() % num_texts == 0 and per_text in (length - 1, length)
    if not is_whole or length < _LEAST_LENGTH or shift_of(labels, tokens) != 1:
        return False
    last = labels.reshape(num_texts, -1)[:, -1]
    return per_text < length or not bool((last == tokens[:, 0].to(last.device)).all())


def _is_read(step: Step, table: int, pick: int, picks: Picks) -> bool:
    """Return whether rows of a pick change with what a table gives for later tokens, and each most
    with what it gives for its own.
    """
    tokens, labels = picks.tokens[table], picks.labels[pick]
    half = tokens.shape[1] // 2
    asked = labels.reshape(len(tokens), -1) != IGNORED_LABEL
    if not bool(asked[:, :half].any()):
        return False

    def seen(places: Any = None) -> Tensor:
        run = _Chances(table, pick, places)
        first_loss(step, run)
        return run.of_texts(len(tokens)) * asked

    def moved(places: slice) -> Tensor:
        return (seen((slice(None), places)) - plain).abs().sum(0)

    plain = picks.chances[pick].float().reshape(len(tokens), -1) * asked
    each = moved(slice(half, None)) / asked.sum(0).clamp(min=1)
    least = _CHANGED if len(tokens) > 1 else _CHANGED_ALONE
    if not float(each[:half].amax()) > least * float(each[half:].amax()):
        return False
    # Statistics of the batch hang on all of it, and numbers that are drawn anew on nothing.
    of_first = seen((slice(0, 1), slice(half, None)))
    if not seen().equal(plain) or not of_first[1:].equal(plain[1:]):
        return False
    places = [n for n in range(half - 2, half + 2) if bool(asked[:, n].any())]
    alone = {place: moved(slice(place, place + 1)) for place in places}
    own = sum(float(one[place]) for place, one in alone.items())
    before = sum(float(one[place - 1]) for place, one in alone.items())
    return own > _OWN * before > 0.0


class _Chances(SecondRun):
    """Keeps what an op that picks labels finds at them, while a table gives other numbers in some
    ``places``.
    """

    def __init__(self, table: int, pick: int, places: Any) -> None:
        super().__init__()
        self._table, self._pick, self._places = table, pick, places
        self._found: Tensor | None = None

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if index == self._table and self._places is not None:
            displace(result, self._places)
        if index == self._pick:
            self._found = chances(op_name(str(func)), args, result)
        return result

    def of_texts(self, num_texts: int) -> Tensor:
        """Return it as [texts, rows], in float32. Raises where the run came to no pick."""
        if self._found is None:
            raise ValueError("the run came to no pick")
        return self._found.float().reshape(num_texts, -1)


def _first_to_read(step: Step, table: int, tokens: Tensor) -> int | None:
    """Return the first op whose places before the half of a text change with what comes after."""
    length = tokens.shape[1]
    runs = [_FirstHalves(table, length, places) for places in (None, True)]
    for run in runs:
        first_loss(step, run)
    plain, moved = (run.seen for run in runs)
    return next((n for n, seen in plain.items() if n in moved and not seen.equal(moved[n])), None)


class _FirstHalves(SecondRun):
    """Keeps the sum of what each op makes for the first half of a text: of results that have the
    length of texts as one of their dimensions, and not the width of a row.
    """

    def __init__(self, table: int, length: int, moves: Any) -> None:
        super().__init__()
        self._table, self._length, self._moves = table, length, moves
        self.seen: dict[int, Tensor] = {}

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        half = self._length // 2
        if index == self._table and self._moves:
            displace(result, (slice(None), slice(half, None)))
        in_forward = torch._C._current_graph_task_id() == -1
        if index > self._table and in_forward and not takes_memory(str(func)):
            for output in outputs_of(func, args, kwargs, result)[:1]:
                dims = [n for n, size in enumerate(output.shape) if size == self._length]
                if len(dims) == 1 and dims[0] and output.dim() > 2 and is_measurable(output):
                    part = output.detach().narrow(dims[0], 0, half)
                    self.seen[index] = part.double().abs().sum()
        return result
