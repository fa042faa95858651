"""The head does not fit the task: it is not trained, or does not know where a sequence ends.

## What happened
The model classifies or scores sequences, and its head keeps the random weights it was made with; or
PEFT was told of another task than the model's; or rows of a batch are padded and the model has no
padding token to know it by.

## Why it happens
`AutoModelForSequenceClassification` puts a new head on a base: for a hidden size of 1536 and one
output, 1536 numbers drawn with a spread of 0.02. PEFT freezes everything that it does not adapt and
makes an exception of the head for `task_type="SEQ_CLS"`, `"TOKEN_CLS"` and `"QUESTION_ANS"` only,
of each task's own (`score` or `classifier`, `qa_outputs`). Without a task type, or with another
one, the score stays a random projection of features that LoRA can only bend towards it, and the
saved adapter does not hold it: a new random head comes with the next load. Decoders read their
score at the last token that is not padding. Without a padding token there is no such place: a batch
of 1 works, a batch of 2 raises `Cannot handle batch sizes > 1`.

## Example
```python
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification

sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8)
config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)

def trains_score(task):
    model = get_peft_model(LlamaForSequenceClassification(config), LoraConfig(task_type=task))
    return any("score" in name for name, p in model.named_parameters() if p.requires_grad)

trains_score(None), trains_score("SEQ_CLS")     # (False, True)
model = LlamaForSequenceClassification(config)
model(torch.ones(2, 4, dtype=torch.long))       # ValueError: Cannot handle batch sizes > 1
```

## Fix
1. `LoraConfig(task_type="SEQ_CLS")`, or `modules_to_save=["score"]`.
   Cost: the head's few parameters.
2. `model.config.pad_token_id = tokenizer.pad_token_id`, after giving the tokenizer one. Cost: none.
3. Load the base with the class of the task. Cost: none.

## Fix safety
All of these change what is trained: it was not what was meant.

## Not to be confused with
NS105: a head that was never initialised. NS102: a head that is trained, but stored in half.
NS114: nothing is trained.

## References
- https://github.com/huggingface/trl/issues/2367
- https://github.com/huggingface/peft/issues/577
- https://github.com/hiyouga/LlamaFactory/issues/2724
- https://github.com/huggingface/trl/issues/422
- https://github.com/huggingface/transformers/pull/35911
"""

from __future__ import annotations

from nanstop.diagnose.evidence.reading import sighting, standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, RunFacts

_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}
"""PEFT's names of tasks whose heads it does not freeze, and of plain language models."""

_REFUSAL = "if no padding token is defined"
"""End of the message of transformers where a batch has more than one row."""


def check(evidence: Evidence) -> Diagnosis | None:
    """Return an untrained head, else a missing padding token, else an adapter for another task."""
    facts = standing(evidence)
    return _untrained_head(facts) or _no_padding(facts, evidence) or _other_task(facts)


def _untrained_head(facts: RunFacts) -> Diagnosis | None:
    head = facts.head
    if head is None or head.trained or not any(group.trainable for group in facts.param_groups):
        return None
    leaf = head.module.rsplit(".", 1)[-1]
    return Diagnosis(
        code="NS109",
        title=f"the head `{leaf}` is not trained",
        cause=f"the model is made for {_words(facts.task)}, and {_frozen_by(facts)}",
        confidence="likely",
        lines=(f'say task_type="{_TASK_TYPES[facts.task or ""]}" or modules_to_save=["{leaf}"]',)
        if facts.adapter is not None
        else (f"set requires_grad on the parameters of `{head.module}`",),
        where=head.module,
    )


def _frozen_by(facts: RunFacts) -> str:
    if facts.adapter is None:
        return "all of its head is frozen"
    kind = facts.adapter.task_type
    return f"PEFT froze its head under {f'task_type {kind}' if kind else 'no task type'}"


def _no_padding(facts: RunFacts, evidence: Evidence) -> Diagnosis | None:
    refused = _REFUSAL in evidence.refusal
    rows = facts.batch_shape[0] if facts.batch_shape else 1
    if facts.head is None or facts.head.pads or rows < 2:
        return None
    return Diagnosis(
        code="NS109",
        title=f"no padding token for batches of {rows} sequences",
        cause="the score is read at the last token that is not padding, and none is known as "
        "padding",
        confidence="certain" if refused else "likely",
        lines=("set model.config.pad_token_id, and the tokenizer's pad_token",),
        where=facts.head.module,
        seen=sighting(evidence, "forward") if refused else None,
    )


def _other_task(facts: RunFacts) -> Diagnosis | None:
    told = facts.adapter.task_type if facts.adapter is not None else None
    meant = _TASK_TYPES.get(facts.task or "")
    if meant is None or told == meant or told not in _TASK_TYPES.values():
        return None
    return Diagnosis(
        code="NS109",
        title=f"an adapter for {told} on a model for {_words(facts.task)}",
        cause=f"PEFT chooses by task type what is trained and saved beside the adapter; {meant} "
        "fits",
        confidence="possible",
        lines=(f'say task_type="{meant}", or load the base with the class of the task',),
        where=facts.model_type or facts.host,
    )


def _words(task: str | None) -> str:
    return (task or "another task").replace("_", " ").replace("lm", "language modelling")


RULE = Rule(
    "NS109", "task-or-head-mismatch", "a head that does not fit the task", check, ("static",)
)
