"""Whether the rows of an objective are asked for the token after the last that they read.

A language model whose labels are not shifted learns to repeat what it reads, one whose labels are
shifted twice to skip a token: both losses are finite and fall. Which token a row is asked for is
seen in the numbers of the labels; which ones it reads, by an experiment: the micro-batch run again,
undone, with other embeddings from one place on. How labels are shifted, and where, plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.fetched import FETCHES
from nanstop.numerics.tensors import tensors
from nanstop.records import ObjectiveRow, op_name
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.tracing.op_patches import LookOfSome, SecondRun, displace
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

MOST_LABELS = 1 << 16
LEAST_LABELS = 8
FURTHEST = 3
"""Places by which labels are looked for beyond their own."""
LIKELIHOODS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
PICKS = LIKELIHOODS | {"gather", "index"}
"""Operations that may take one class of each row."""
_BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
LEAST_TARGET, LARGEST_TARGET = -0.5, 1.5
"""Noise takes smoothed labels a little beyond 0 and 1."""
_SAME = 1e-6


class Picks(LookOfSome):
    """Keeps the tokens of each table and the labels by which rows are picked from, by the op's
    index.
    """

    ops = PICKS | {"embedding"}

    def __init__(self) -> None:
        self.tokens: dict[int, Tensor] = {}
        self.labels: dict[int, Tensor] = {}
        self.chances: dict[int, Tensor] = {}
        """Of each label: the log-probability, or the score, that its row gives it."""
        self.likelihoods: set[int] = set()
        """Ops that ignore a label: one of ``IGNORED_LABEL`` here, whatever they call it."""

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base = op_name(str(func))
        if base == "embedding" and are_tokens(args[1]):
            self.tokens[index] = args[1].detach().clone()
        labels = picked(base, args)
        if labels is not None and args[0].requires_grad and labels.numel() <= MOST_LABELS:
            self.labels[index] = labels.detach().clone()
            if base in LIKELIHOODS:
                self.likelihoods.add(index)
                ignored = self.labels[index] == args[4]
                self.labels[index].masked_fill_(ignored, IGNORED_LABEL)
            return lambda result: self.chances.update({index: chances(base, args, result)})
        return None


def are_tokens(ids: Tensor) -> bool:
    """Return whether a table is asked for tokens of texts, not for the places they have."""
    if ids.dim() != 2 or ids.numel() > MOST_LABELS:
        return False
    places = torch.arange(ids.shape[1], device=ids.device, dtype=ids.dtype)
    return not torch.equal(ids, places.expand_as(ids))


@torch.no_grad()
def chances(base: str, args: Any, result: Any) -> Tensor:
    """Return what an op that picks labels finds at each of them."""
    if base not in LIKELIHOODS:
        return result.detach().clone()
    labels = args[1].clamp(min=0, max=args[0].shape[1] - 1)  # its result is the mean of them
    return args[0].gather(1, labels.unsqueeze(1)).squeeze(1)


def picked(base: str, args: Any) -> Tensor | None:
    """Return which class of each row an op takes, None where it takes no such thing."""
    if base in LIKELIHOODS:
        return args[1]
    if base == "gather" and args[1] in (-1, args[0].dim() - 1) and args[2].shape[-1:] == (1,):
        return args[2]
    if base == "index" and args[0].dim() == 2 and len(args[1]) == 2 and None not in args[1]:
        rows, classes = args[1]
        if rows.shape == classes.shape == args[0].shape[:1] and rows.dtype == torch.int64:
            one_each = torch.arange(len(rows), device=rows.device)
            return classes if torch.equal(rows, one_each) else None
    return None


def misaligned_rows(step: Step, picks: Picks) -> tuple[ObjectiveRow, ...]:
    """Return the picks of the first micro-batch whose every label is the last token that its row
    reads, or one further away than the next.

    () where any pick is of the next token: further heads may be asked for later ones. Undone
    bitwise; runs the micro-batch four times where labels stand in an odd place, and not at all
    elsewhere. Synchronises the device.
    """
    found = [
        (shift, table, pick)
        for pick, labels in picks.labels.items()
        for table, tokens in picks.tokens.items()
        if (shift := shift_of(labels, tokens)) is not None
    ]
    # Tokens that were moved on are read as well as they are: a window, or a decoder's inputs.
    if any(shift == 1 for shift, _, _ in found):
        return ()
    placed = {pick: (table, shift) for shift, table, pick in sorted(found, reverse=True)}
    rows: list[ObjectiveRow] = []
    for pick, (table, shift) in placed.items():
        ahead = _reads_ahead(step, table, pick, picks.tokens[table])
        if ahead is None or shift - ahead == 1:
            return ()
        op = first_ops(step)[pick]
        given = "own_token" if shift - ahead < 1 else "later_token"
        width = op.inputs[0].shape[-1] if op.inputs else 0
        rows.append(
            ObjectiveRow(
                op=op.name,
                module=op.module,
                given=given,
                width=width,
                line=line_text(op.line),
                made_at=_shifted_at(step, picks.tokens[table]) if shift else (),
            )
        )
    return tuple(rows)


def _shifted_at(step: Step, tokens: Tensor) -> tuple[str, ...]:
    """Return the lines that put labels further behind the tokens, as far as they are known."""

    def places(values: Tensor) -> int:
        if values.dtype != tokens.dtype or values.dim() < 2 or len(values) != len(tokens):
            return 0
        return shift_of(values, tokens) or 0

    makers: Any = getattr(step, "makers", None)
    found = tuple(map(line_text, makers(places))) if makers is not None else ()
    return found or FETCHES.makers(places)


def shift_of(labels: Tensor, tokens: Tensor) -> int | None:
    """Return how many places after its row each label stands among the tokens, None where that is
    not one number, or more than one.
    """
    num_texts, length = tokens.shape
    if labels.numel() % num_texts:
        return None
    placed = labels.reshape(num_texts, -1).to(tokens.device)
    found = [shift for shift in range(FURTHEST) if _stand(placed, tokens, shift, length)]
    return found[0] if len(found) == 1 else None


def _stand(labels: Tensor, tokens: Tensor, shift: int, length: int) -> bool:
    num = min(labels.shape[1], length - shift)
    if labels.shape[1] > length:
        return False
    read, meant = labels[:, :num], tokens[:, shift : shift + num]
    known = read != IGNORED_LABEL
    return int(known.sum()) >= LEAST_LABELS and bool((read == meant)[known].all())


def _reads_ahead(step: Step, table: int, pick: int, tokens: Tensor) -> int | None:
    """Return how many places after its own is the last token that a row reads, None where rows
    read what comes after any.
    """
    half = tokens.shape[1] // 2

    def rows(places: Any) -> Tensor | None:
        run = MovedTable(table, pick, places)
        first_loss(step, run)
        return run.rows(len(tokens))

    plain, found = rows(None), []
    for place in (half, half + 1):
        later = (slice(None), slice(place, None))
        moved = rows(later)
        if plain is None or moved is None or plain.shape != moved.shape:
            return None
        is_moved = (plain != moved).flatten(2).any(-1).any(0)
        first = int(is_moved.int().argmax())
        if not bool(is_moved[first:].all()):  # none, or rows that are no places of a text
            return None
        found.append(place - first)
    return found[0] if found[0] == found[1] else None


class MovedTable(SecondRun):
    """Keeps what the op ``pick`` reads, or gives where ``is_given``, while a table gives other
    numbers in some ``places``.
    """

    def __init__(
        self, table: int, pick: int | None, places: Any = None, *, is_given: bool = False
    ) -> None:
        super().__init__()
        self._read: Tensor | None = None
        self._table, self._pick, self._places = table, pick, places
        self._is_given = is_given

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._pick and not self._is_given:
            read = args[0].detach().clone()
            has_classes_second = op_name(str(func)) in LIKELIHOODS and read.dim() > 2
            self._read = read.movedim(1, -1) if has_classes_second else read
        result = func(*args, **kwargs)
        if index == self._table and self._places is not None:
            displace(result, self._places)
        if index == self._pick and self._is_given:
            self._read = tensors(result)[0].detach().clone()  # beside it, what its backward reads
        return result

    def rows(self, num_texts: int) -> Tensor | None:
        """Return what the pick has read in a run under this, [texts, rows, classes]; None where it
        was not met, or reads no rows.
        """
        if self._read is None or self._read.dim() < 2:
            return None
        return self._read.reshape(num_texts, -1, self._read.shape[-1])


class Targets(LookOfSome):
    """Keeps of binary cross entropies, by the op's index, a target that is far beyond 0 and 1."""

    ops = _BINARY

    def __init__(self) -> None:
        self.beyond: dict[int, float] = {}

    def __call__(
        self, index: int, _func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if args[0].requires_grad and args[1].numel():
            low, high = torch.aminmax(args[1].detach())
            if float(low) < LEAST_TARGET:
                self.beyond[index] = float(low)
            elif float(high) > LARGEST_TARGET:
                self.beyond[index] = float(high)
        return None


def beyond_rows(step: Step, targets: Targets) -> tuple[ObjectiveRow, ...]:
    """Return the binary cross entropies of the first micro-batch that count targets beyond 0 and
    1: with 0 in their place, or 1, the loss is another one. Such a target has no logit at which
    its term is least.

    Undone bitwise; runs the micro-batch three times and once more where there are any, and not at
    all elsewhere. Synchronises the device.
    """
    rows: list[ObjectiveRow] = []
    for index, target in targets.beyond.items():
        plain, *others = (first_loss(step, _Bounded(index, to)) for to in (None, 0.0, 1.0))
        if all(abs(other - plain) <= _SAME * abs(plain) for other in others):
            continue
        op = first_ops(step)[index]
        row = ObjectiveRow(
            op=op.name,
            module=op.module,
            given="beyond",
            width=int(target),
            line=line_text(op.line),
        )
        rows.append(row)
    return tuple(rows)


class _Bounded(SecondRun):
    """Has one operation read ``to`` in the place of targets beyond 0 and 1, all where it is
    None.
    """

    def __init__(self, at: int, to: float | None) -> None:
        super().__init__()
        self._at, self._to = at, to

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._at and self._to is not None:
            read = args[1]
            bounded = read.masked_fill((read < 0.0) | (read > 1.0), self._to)
            args = (args[0], bounded, *args[2:])
        return func(*args, **kwargs)
