"""The first rows of the data, as the model gets them, cannot teach what they are meant to.

## What happened
Of the first rows, counted as they come out of the run's own collator, none holds a label (or half
of them hold none), or all begin with the token of a beginning twice, or all are cut before their
end. The loss may be 0, or fall as it should: what the model learns is not what the texts say.

## Why it happens
Labels are lost one row at a time: a chat template without `{% generation %}` marks no token of an
answer, so that `assistant_only_loss` leaves 0 labels of 100 %; a prompt of 2100 tokens at a length
of 2048 leaves 0 of its answer. Where a loss divides by max(1, number of labels), that is 0 / 1 = 0,
with a gradient of 0, in step after step. A template that writes `<s>` and a tokenizer that adds it
make `<s><s>`: two of 2 first tokens, in training only or in use only, which the model was never
shown before. Rows that are all as long as the limit, 64 of 64, with no token of an end anywhere,
have all been cut: none of them teaches the model to stop, and answers that stood at the end are
gone. The first texts that a tokenizer is given are known again in the batches of a model that
predicts tokens: rows that all end before their texts do were cut, at whatever length.

With `tokenizer.pad_token = tokenizer.eos_token` a collator for language models takes out the label
of each end together with those of the padding: 0 of 64 ends are trained on, the loss falls, and
what is generated goes on to the longest length.

Ranks that are to share the rows among them, and draw from one loader with one seed, read the same
ones: 8 ranks take 8 times the power to learn what one of them learns. The first three batches of
each rank are compared.

## Example
```python
import torch
from torch.nn.functional import cross_entropy

logits = torch.randn(64, 5, requires_grad=True)
labels = torch.full((64,), -100)
total = cross_entropy(logits, labels, reduction="sum")
total / (labels != -100).sum().clamp(min=1)         # tensor(0., grad_fn=<DivBackward0>)
```

## Fix
1. Decode a row, and see which labels are not -100: `tokenizer.decode(labels[labels != -100])`.
   Cost: a minute.
2. A template with `{% generation %}` around each answer, or `completion_only_loss` with prompts and
   completions. Cost: none.
3. Tokenize what a template made with `add_special_tokens=False`. Cost: none.
4. Raise `max_length`, or cut prompts instead of answers. Cost: memory.
5. Give each rank rows of its own, `DataLoader(data, sampler=DistributedSampler(data))`, and call
   `set_epoch` in each epoch. Cost: none.
6. Give padding a token of its own: `tokenizer.add_special_tokens({"pad_token": "<pad>"})`, or one
   that the tokenizer has and no text holds. Cost: a row of the table.

## Fix safety
All of them change training, to what the texts say.

## Not to be confused with
NS503: a micro-batch without labels whose loss is NaN. NS701: rewards that never differ. Packed rows
are as long as the limit by design, and hold ends inside; they are not counted as cut.

## References
- https://github.com/huggingface/trl/issues/6668
- https://github.com/marin-community/marin/issues/7237
- https://github.com/OpenRLHF/OpenRLHF/issues/393
- https://github.com/deepseek-ai/DeepSeek-R1/issues/151
- https://github.com/huggingface/transformers/issues/23530
- https://github.com/huggingface/trl/issues/976
"""

from __future__ import annotations

from collections.abc import Iterator

from nanstop.diagnose.evidence.reading import sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Confidence, DataFacts, Diagnosis, Evidence, RunFacts, TextFacts

LEAST_ROWS = 8
"""Rows from which what they share is no accident."""
MOST = 0.9
"""Share of rows that begin twice: what a template does, it does to all."""

_Lack = tuple[Confidence, str, str]


def check(evidence: Evidence) -> Diagnosis | None:
    """Return what the first rows lack, the worst of it first."""
    facts = standing(evidence)
    found, same = list(_lacks(facts)), list(_given_to_all(facts))
    if not (found or same):
        return None
    (confidence, cause, advice), *others = (*found, *same)
    is_seen = bool({"data", "ranks_given_same"} & set(evidence.learned))
    return Diagnosis(
        code="NS505",
        title="the data cannot teach" if found else "all ranks are given the same batches",
        cause=cause,
        confidence=confidence,
        lines=(*_lines(facts.data, cause), *(f"also {one[1]}" for one in others), advice),
        where=facts.host,
        seen=sighting(evidence, "forward") if is_seen else None,
    )


def _lacks(facts: RunFacts) -> Iterator[_Lack]:
    data = facts.data
    if data is not None and data.num_rows >= LEAST_ROWS:
        yield from (*_unlabelled(data, facts.text), *_one_label(data, facts.text))
        yield from _endless(data, facts.text)
        yield from (*_twice(data), *(_cut(data) or _shortened(data)))


def _given_to_all(facts: RunFacts) -> Iterator[_Lack]:
    if facts.ranks_given_same:
        cause = (
            f"the first batches of {facts.ranks_given_same} ranks are the same, bit for bit: "
            "together they learn what one of them would learn"
        )
        advice = "give each its own rows: DataLoader(..., sampler=DistributedSampler(data))"
        yield "likely", cause, advice


def _lines(data: DataFacts | None, cause: str) -> tuple[str, ...]:
    """Return the lines of the script that make what is lacking, as far as they are known."""
    if data is None:
        return ()
    if any(cause == one for _, one, _ in (*_twice(data), *_cut(data))):
        return data.tokenized_at
    if any(cause == one for _, one, _ in _shortened(data)):
        return data.shortened_at or data.tokenized_at
    return data.masked_at


def _unlabelled(data: DataFacts, text: TextFacts | None) -> Iterator[_Lack]:
    without = data.num_without_labels
    if not without or 2 * without < data.num_labelled:
        return
    none = without == data.num_labelled
    option = f" under {text.masking}" if text is not None and text.masking else ""
    cause = f"{without} of the first {data.num_labelled} rows hold no label{option}"
    advice = "decode a row: is the answer marked by the template, and inside max_length?"
    yield "certain" if none else "likely", cause, advice


def _one_label(data: DataFacts, text: TextFacts | None) -> Iterator[_Lack]:
    special = (text.bos, *text.eos, text.pad) if text is not None else ()
    if data.only_label is None or data.only_label not in special:
        return
    cause = (
        f"every label of the first {data.num_rows} rows is one token, {data.only_label}, which is "
        "no part of any text"
    )
    yield "likely", cause, "decode the labels of a row: is the answer among them?"


def _twice(data: DataFacts) -> Iterator[_Lack]:
    if data.num_twice_begun >= MOST * data.num_rows:
        cause = (
            f"{data.num_twice_begun} of the first {data.num_rows} rows begin with two BOS tokens"
        )
        yield "likely", cause, "tokenize what a template made with add_special_tokens=False"


def _endless(data: DataFacts, text: TextFacts | None) -> Iterator[_Lack]:
    if data.num_ends < LEAST_ROWS or data.num_ends_ignored < data.num_ends:
        return
    cause = (
        f"{data.num_ends} of the first {data.num_rows} rows hold an end after what is trained on, "
        "and it is a label in none: the model is not taught to stop"
    )
    is_padding = text is not None and text.pad in text.eos
    advice = (
        "the end is the padding token, too, whose labels are taken out: give padding a token of "
        "its own"
        if is_padding
        else "let the labels of an answer go on to its end"
    )
    yield "likely", cause, advice


def _cut(data: DataFacts) -> list[_Lack]:
    if data.num_cut < data.num_rows:
        return []
    cause = f"all of the first {data.num_rows} rows are cut at the longest length, without an end"
    return [("likely", cause, "raise max_length, or cut prompts instead of answers")]


def _shortened(data: DataFacts) -> list[_Lack]:
    if data.num_shortened < data.num_rows:
        return []
    cause = (
        f"all of the first {data.num_rows} rows end before their texts do: of each the tokenizer "
        "was given more"
    )
    return [("likely", cause, "cut at a length that answers fit into, or cut prompts instead")]


RULE = Rule("NS505", "data-that-cannot-teach", "the data cannot teach", check, ("static",))
