"""Token rows look as if they had never been trained.

## What happened
Some rows of the embedding or of the output head are all zero, or their norm is far off that of the
others: new tokens after the vocabulary was extended, or reserved tokens that the base model never
saw and a chat template now uses.

## Why it happens
A zero row is divided by its own norm: in the first RMS normalisation 0 / sqrt(0 + 1e-6) is 0, but
the derivative there is 1 / sqrt(1e-6) = 1000, so the first gradients of that row are a thousand
times those of a row whose root mean square is 1, and 20 times those of one drawn with a deviation
of 0.02; with an epsilon of 1e-12 a million and 20000 times. Where weights are normalised by rows
(DoRA) it is 0 / 0 = NaN at once. With tied weights the row also is the token's output row: its
logit is exactly 0 for every context, which beats all others as soon as these are negative. A row
drawn at random is no better where the embedding is scaled: Gemma multiplies by sqrt(3072) = 55.

## Example
```python
import torch

def gradient(row):
    row = row.clone().requires_grad_()
    normed = row * torch.rsqrt(row.pow(2).mean() + 1e-6)      # an RMS normalisation
    normed.sum().backward()
    return row.grad.norm().item()

drawn = torch.linspace(-0.035, 0.035, 4096)                   # deviation 0.02
round(gradient(torch.zeros(4096)) / gradient(drawn))          # 20
```

## Fix
1. Set the rows to the mean of the trained rows, plus a little noise, so that they can differ: what
   `resize_token_embeddings` does by itself (`mean_resizing=True`) where the table really grows.
   Cost: none.
2. Draw them from a normal distribution with the mean and spread of the trained rows. Cost: none;
   a noisier start.
3. With adapters, say that the rows are trained: `trainable_token_indices` in LoraConfig, or
   `modules_to_save` for the whole table; LoRA leaves them as they are otherwise. Cost: the rows, or
   the whole table, with their moments.

## Fix safety
Changes training: the rows get other values. It is done only when allowed.

## Not to be confused with
NS502, an id that has no row at all. The padding row is zero on purpose and never read by attention.

## References
- https://github.com/huggingface/transformers/issues/29219
- https://github.com/unslothai/unsloth/issues/1024
- https://github.com/huggingface/peft/issues/1715
- https://github.com/huggingface/peft/issues/2049
"""

from __future__ import annotations

from nanstop.diagnose.evidence.candidates import Candidates, initialised
from nanstop.diagnose.evidence.reading import standing
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, TokenRows
from nanstop.wording import counted, number

_UNSEEN = "rows that no id of this run reaches do no harm: the ids were not looked at"


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the tables with zero or outlying rows."""
    scan = evidence.checkpoint
    known = standing(evidence).token_rows or (scan.token_rows if scan is not None else ())
    # A table of zeros throughout begins so on purpose: first-order terms, context vectors.
    known = tuple(rows for rows in known if len(rows.zero_rows) < rows.num_rows)
    tables = [rows for rows in known if rows.zero_rows or rows.outlier_rows]
    if not tables:
        return None
    num_zero = sum(len(table.zero_rows) for table in tables)
    num_outlying = sum(len(table.outlier_rows) for table in tables)
    return Diagnosis(
        code="NS103",
        title="token rows that were never trained",
        cause=_cause(num_zero, num_outlying),
        confidence="certain" if num_zero else "possible",
        lines=(*(_describe(table) for table in tables), _UNSEEN),
        remedies=_initialisations(tables),
        where=tables[0].parameter,
    )


def _cause(num_zero: int, num_outlying: int) -> str:
    zero = f"{counted(num_zero, 'row')} all zero" if num_zero else ""
    outlying = f"{counted(num_outlying, 'row')} far off the others' norm" if num_outlying else ""
    return " and ".join(part for part in (zero, outlying) if part)


def _describe(table: TokenRows) -> str:
    rows = (*table.zero_rows, *table.outlier_rows)
    shown = ", ".join(str(row) for row in rows[:6]) + (", ..." if len(rows) > 6 else "")
    tied = ", tied with the head" if table.tied else ""
    trained = "trainable" if table.trainable else "frozen"
    norm = number(float(f"{table.median_norm:.4g}"))
    return (
        f"`{table.parameter}` ({trained}{tied}): rows {shown} of {table.num_rows}; median norm "
        f"{norm}"
    )


def _initialisations(tables: list[TokenRows]) -> Candidates:
    return tuple(tuple(initialised(table, how) for table in tables) for how in ("mean", "normal"))


RULE = Rule(
    "NS103", "untrained-token-rows", "token rows that were never trained", check, ("static",)
)
