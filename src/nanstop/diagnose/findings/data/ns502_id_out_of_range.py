"""A token or label id has no row in its table.

## What happened
The batch holds an id that is negative or not smaller than the number of rows of the embedding (or
of classes). On the CPU that raises `index out of range`; on CUDA it is a device assert that ends
the process's use of the GPU, reported at a later, innocent line.

## Why it happens
A vocabulary of 32000 has rows 0 to 31999. Adding a `[PAD]` token gives it id 32000, and without
`resize_token_embeddings` there is no such row. Labels of -1 instead of -100 are another: the loss
ignores -100 only.

## Example
```python
import torch

table = torch.nn.Embedding(32000, 8)
table(torch.tensor([32000]))        # IndexError: index out of range in self
```

```python
import torch

labels = torch.tensor([-1])         # meant: -100
torch.nn.functional.cross_entropy(torch.zeros(1, 5), labels)  # IndexError: Target -1 is out of
```

## Fix
1. `model.resize_token_embeddings(len(tokenizer))`, then initialise the new rows (NS103).
   Cost: a few rows.
2. Use an existing token for padding, best one that no text holds, such as a reserved one. Cost:
   with `tokenizer.pad_token = tokenizer.eos_token` the collator for language models masks the
   labels of real ends too (transformers 5.23: every label that equals the padding token), so that
   the model never learns to stop; mask by the attention mask there.
3. Mark labels to ignore with -100. Cost: none.
4. Drop the micro-batch. Cost: its data; the next one with that token fails again.

## Fix safety
Dropping data changes training; it is applied only when allowed.

## Not to be confused with
NS103: the row exists and was never trained. An IndexError of your own data set code.

## References
- https://github.com/meta-llama/llama-cookbook/issues/189
- https://github.com/fc2869/lo-fit/issues/1
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nanstop.diagnose.evidence.candidates import without_rows
from nanstop.diagnose.evidence.reading import (
    WRITTEN,
    born,
    failing_batch,
    foreign_kernel,
    raised_message,
    raised_op,
    standing,
)
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import (
    BatchFact,
    Diagnosis,
    Evidence,
    OpEvent,
    RunFacts,
    TensorStats,
    op_name,
)
from nanstop.records.formats import is_float
from nanstop.records.values import origin_of
from nanstop.records.vocabulary import IGNORED_LABEL
from nanstop.wording import number

LABELS = 1
"""The axis of classes."""
_MESSAGE = re.compile(
    r"index out of range|out of bounds|device-side assert|indexSelectLargeIndex|Target -?\d+ is|"
    r"class values must be",
    re.IGNORECASE,
)
_OF_ONE_HOT = re.compile(r"class values must be", re.IGNORECASE)
_NUMBER = re.compile(r"(?:index|Target) (-?\d+) is", re.IGNORECASE)
_AXIS = re.compile(r"out of bounds for dimension (\d+) with size")
_OF_IGNORED = (
    f"{IGNORED_LABEL} marks what losses leave out, and is no id: look up labels.clamp(min=0), and "
    "leave those places out by a mask"
)
_OF_LABELS = (
    f"Mark labels that are to be left out with {IGNORED_LABEL}, count the others from 0, and give "
    "the head as many classes as there are (`num_labels`)."
)
_OF_CLASSES = (
    "A class is a number from 0 to one less than `num_classes`: look up `labels.clamp(min=0)` "
    "where labels below 0 mark what is left out, and leave those places out by a mask; count the "
    "others from 0."
)
_OF_OTHERS = (
    "This is no table of tokens: give it only ids that it has a row for, or none, or load the "
    "model with a larger one (types, positions and languages have settings of their own)."
)
_OF_POSITIONS = (
    "It has {rows} places: cut texts to that length, what the model puts before them (virtual "
    "tokens) included, or give it more (`max_position_embeddings`)."
)
_OF_PLACES = (
    "What it looks in is no table of the model. Its places are counted from 0 to {last}: look at "
    "the data (a label too many, or counted from 1), or make it with one place more."
)
_OF_NEGATIVES = (
    "A number below 0 marks what has no place there (padding, as `mask.cumsum(-1) - 1` counts it): "
    "look up `clamp(min=0)`, and leave those places out by the mask."
)
_OF_CASTS = (
    "No id is that far from 0: Inf and NaN come to such numbers as integers. Look for what is "
    "divided by 0, or has no logarithm, before it is cast: a distance, or a length, of an option."
)
_FARTHEST = 2.0**62
"""What nothing counts up to."""
_BEFORE = ("from_batch", "from_buffer", "from_constant", "from_param", "from_state", "carried_over")
"""Origins of values that were not finite when the step began."""
_NOT_IDS = ("position", "type", "mask", "length", "cu_seqlens")


ROWS_AT = {
    "embedding": 0,
    "_embedding_bag": 0,
    "_embedding_bag_forward_only": 0,
    "nll_loss_forward": LABELS,
    "nll_loss2d_forward": LABELS,
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_unsafe_index_put"), 0),
}
"""Operations that look something up by number, with the axis of what they look in; those that are
given the axis name it by their first number, and the message by which of several axes.
"""
FROM_THE_END = ("index", "_unsafe_index", "index_put", "_unsafe_index_put")
"""Those for which -1 is the last row."""
UNCHECKED = ("_ctc_loss", "_cudnn_ctc_loss")
"""Those that read beyond what they look in without a word (torch 2.13)."""
ALONG = ("gather", "index_select", "scatter", "scatter_add", "index_add", "index_copy")


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if an id exceeds its table, or an exception says so."""
    facts, (asked, wanted) = standing(evidence), _lookup(evidence)
    wrong = _of_another_table(evidence, wanted)
    if wrong is None:
        wrong = [problem for fact in failing_batch(evidence) if (problem := _problem(fact, facts))]
    raised = _message(evidence)
    if (not wrong and not raised) or _raised_elsewhere(evidence) or _born_elsewhere(evidence):
        return None
    is_said = bool(wrong or _OF_ONE_HOT.search(raised))
    return Diagnosis(
        code="NS502",
        title="id out of range" + (f": {wrong[0]}" if wrong else ""),
        cause=raised or "an id of the batch has no row in the table",
        confidence="certain" if asked else ("likely" if is_said else "possible"),
        confirmed=asked,
        lines=(*wrong[1:], *_too_small(failing_batch(evidence), facts)),
        remedies=without_rows(evidence),
        usual_cure=_usual_cure(evidence, wanted),
        where=wrong[0].split("`")[1] if wrong else "",
    )


def _of_another_table(evidence: Evidence, wanted: float | None) -> list[str] | None:
    """Return what is wrong with the ids of the table that raised, None where that is the one of
    tokens or is not known: what else the batch holds has rows of its own.
    """
    event, tokens = raised_op(evidence), standing(evidence).table_rows or standing(evidence).vocab
    if wanted is None or event is None or not event.name.startswith(("embedding", "_embedding")):
        return None
    rows, (_, _, name) = event.inputs[0].shape[0], (event.inputs[1].name or "").partition("[")
    if wanted < 0:
        return [f"`{name[:-1]}` holds {number(wanted)}"] if name else None
    if tokens in (None, rows) or wanted < rows:
        return None
    return [f"`{name[:-1]}` reaches {number(wanted)}, the table has {rows} rows"] if name else []


def _usual_cure(evidence: Evidence, wanted: float | None) -> str:
    """Return the cure by what was looked in, "" for a table of tokens, or where that is not
    known.
    """
    event, tokens = raised_op(evidence), standing(evidence).table_rows
    if wanted is None or event is None:
        return _OF_CLASSES if _OF_ONE_HOT.search(raised_message(evidence)) else ""
    if wanted == IGNORED_LABEL:
        return _OF_IGNORED
    if ROWS_AT.get(event.name) == LABELS:
        return _OF_LABELS
    table = event.inputs[0]
    rows = table.shape[_axis(evidence, event)]
    if abs(wanted) > _FARTHEST:
        return _OF_CASTS
    if wanted < 0:
        return _OF_NEGATIVES
    is_table = event.name.startswith(("embedding", "_embedding"))
    if not is_table and origin_of(table.name) not in ("from_param", "from_buffer"):
        return _OF_PLACES.format(last=rows - 1)
    if tokens in (None, rows):
        return ""
    # What no batch holds, and no token is, the model has counted out itself.
    return _OF_OTHERS if event.inputs[1].name else _OF_POSITIONS.format(rows=rows)


def _raised_elsewhere(evidence: Evidence) -> bool:
    """Return whether the operation that raised is known, and looks nothing up."""
    event = raised_op(evidence)
    return event is not None and event.name not in (*ROWS_AT, *ALONG)


def _born_elsewhere(evidence: Evidence) -> bool:
    """Return whether nothing raised, and the bad value was one before the step, or an operation of
    torch that looks nothing up made it. What another library's kernel reads beyond its table is not
    known.
    """
    if raised_message(evidence):
        return False
    if evidence.localization is not None and evidence.localization.origin in _BEFORE:
        return True
    event = born(evidence, WRITTEN)
    if event is None or foreign_kernel(event):
        return False
    return op_name(event.op) not in (*ROWS_AT, *ALONG, *UNCHECKED)


def _lookup(evidence: Evidence) -> tuple[str, float | None]:
    """Return in words, and as itself, which number the operation that raised was asked for, if it
    is beyond its table.
    """
    event = raised_op(evidence)
    if event is None or _raised_elsewhere(evidence) or len(event.inputs) < 2:
        return "", None
    axis, table, ids = _axis(evidence, event), event.inputs[0], event.inputs[1]
    if is_float(ids.dtype) or not -len(table.shape) <= axis < len(table.shape):
        return "", None
    rows = table.shape[axis]
    least = -rows if event.name in FROM_THE_END else 0
    asked = _asked_for(evidence, ids, least)
    if least <= asked < rows:
        return "", None
    said = f"`{event.name}` was asked for {number(asked)}; what it looks in has {rows} rows"
    return said, asked


def _axis(evidence: Evidence, event: OpEvent) -> int:
    """Return the axis of what an operation looks in on which it was asked for a number."""
    named = _AXIS.search(raised_message(evidence)) if event.name in FROM_THE_END else None
    if named is not None:
        return int(named[1])
    return ROWS_AT.get(event.name, int(event.scalars[0]) if event.scalars else 0)


def _asked_for(evidence: Evidence, ids: TensorStats, least: float) -> float:
    """Return the number that was looked up: the message says it, or the least of ``ids`` is below
    ``least``, or else the largest in size, whose sign the batch says.
    """
    named = _NUMBER.search(raised_message(evidence))
    if named is not None:
        return float(named[1])
    largest = ids.absmax
    if ids.minimum is not None:
        return ids.minimum if ids.minimum < least else largest
    batch = failing_batch(evidence)
    is_below = any(fact.minimum == -largest for fact in batch)
    return -largest if is_below and not any(fact.maximum == largest for fact in batch) else largest


def _problem(fact: BatchFact, facts: RunFacts) -> str | None:
    rows = facts.table_rows or facts.vocab
    if is_float(fact.dtype) or fact.dtype == "bool" or any(word in fact.name for word in _NOT_IDS):
        return None
    if rows is not None and fact.maximum is not None and fact.maximum >= rows:
        return f"`{fact.name}` reaches {number(fact.maximum)}, the table has {rows} rows"
    low = fact.minimum
    is_labels = "label" in fact.name or fact.num_supervised is not None
    if low is not None and low < 0 and not (low == IGNORED_LABEL and is_labels):
        return f"`{fact.name}` holds {number(low)}"
    return None


def _too_small(batch: Sequence[BatchFact], facts: RunFacts) -> tuple[str, ...]:
    """Return how a table is to grow that has a row less than there are tokens, or several."""
    rows, vocab = facts.table_rows, facts.vocab
    largest = max((fact.maximum or 0.0 for fact in batch if _problem(fact, facts)), default=0.0)
    if rows is None or vocab is None or not rows <= largest < vocab:
        return ()
    grown = f"model.resize_token_embeddings({vocab})"
    return (f"the vocabulary has {vocab} tokens: {grown} gives each a row",)


def _message(evidence: Evidence) -> str:
    text = raised_message(evidence)
    return text if _MESSAGE.search(text) else ""


RULE = Rule("NS502", "id-out-of-range", "token or label id without a row", check, ("incident",))
