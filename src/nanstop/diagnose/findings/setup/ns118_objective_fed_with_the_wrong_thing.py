"""The objective reads probabilities or scores where it expects logits or log-probabilities.

## What happened
A cross entropy was given the output of a softmax, a binary cross entropy with logits that of a
sigmoid, or a negative log-likelihood something that is no logarithm. All of it is finite, the loss
falls a little, and stays far above what the model could reach, or falls without end.

## Why it happens
`cross_entropy` takes a softmax itself. Of C probabilities it sees the best case as one 1 and C - 1
zeros, and makes e / (e + C - 1) of it: for 10 classes a probability of 0.23 and a loss of 1.46 that
no training goes below, for a vocabulary of 32000 a loss of 9.37 where guessing has 10.37. The
gradient passes through two softmaxes, of which the first is saturated. A sigmoid before
`binary_cross_entropy_with_logits` leaves probabilities between sigmoid(0) = 0.5 and sigmoid(1) =
0.73: no negative can be called one. Before `cross_entropy` it leaves scores of which the best are
one 1 and C - 1 zeros again, with the same floor; where a loss is at its best for scores between 0
and 1, as of relevances that are soft targets, nothing is said. `nll_loss` takes no logarithm: of
probabilities it is -p, between -1 and 0, and of plain scores it has no lower bound, since a score
may grow for ever. Nor does `kl_div`, of its first argument: of probabilities q it is the sum of p
log(p) - p q, below 0, and smallest where q is 1 for the class that p has most of. A softmax along
another dimension, of the steps or the batch in place of the classes, compares what is no
alternative: its logarithms sum to whole numbers there, and not along the classes. `log_softmax`
before `cross_entropy` is harmless: log-probabilities are their own log-softmax. A loss that is
spelled by hand is known by how it answers to other numbers: what falls in step with scores that are
raised by 1000 and by 10000 has no lower bound, and what is a + b (log(1 + exp(s)) - c s) as a
function of one number s in the place of all scores is a binary cross entropy of logits.

Labels can be the wrong thing as well. Row i of a language model has read tokens 0 to i, and is to
be asked for token i + 1. Asked for token i it learns to repeat it, with a loss that falls to 0;
shifted twice it is asked for i + 2, and a text of it leaves out every other token. Where labels
stand is seen in their numbers, what a row has read by an experiment: other embeddings from one
place on, in a micro-batch that is run again.

A row can have read what it is asked for. Where it reads tokens that come after it, the answer is in
sight: the loss falls to 0 by copying, and what is generated is no better for it.
`scaled_dot_product_attention` hides what a mask of booleans leaves out, and adds a mask of numbers
to its scores: 0 and 1 hide nothing. That is told by an experiment: other embeddings in the second
half of each text leave the rows of the first half as they are, where a model reads forwards.

Targets [N] against outputs [N, 1] are N x N differences: the missing dimension is put in front, and
each output is compared with the targets of all rows. The loss is smallest where every output is the
mean of the targets, and falls to their variance. `mse_loss` warns of it once, a difference written
by hand does not. That a dimension was put in front is seen in the shapes, that the rows are lost by
it, by an experiment: targets in another order, which leave the loss as it is.

Rows can be mixed. A head makes scores `[batch, length, classes]`, a loss may want `[batch, classes,
length]`: `transpose(1, 2)` has two dimensions change places, `view` and `reshape` leave the numbers
where they lie, and a row of the loss holds pieces of several. That is seen in the memory, and told
by an experiment: other scores in one row of the head, in a micro-batch that is run again.

A reference can be the policy: the same module, or one whose parameters were given the policy's
memory. Then each log-ratio is 0, at the first update as in health, and at the third as well: a
penalty holds nothing back, and a preference loss is log(2) = 0.693 whatever is learned. It is told
after three updates in a row, where the difference has no part in any gradient, the parameters
share their memory, or the loss was one number each time and answers a difference of thousands as a
preference does: not at all, or as fast as it grows. Ratios to what a policy was when it acted have
a gradient at 0, and no such answer.

A mask can be the wrong way round: `attention_mask` of transformers is 1 where a token is read,
`key_padding_mask` of torch True where it is not. Texts are hidden then and their padding is read,
and the loss falls to what is known without them. That is told by an experiment: other embeddings of
the padding change the outputs, other ones of the texts do not, beside those of the token itself.

A penalty can be deaf. `torch.autograd.grad` without `create_graph=True` gives numbers: their square
is added to the loss, which is larger for it, and no weight hears of it. That is told by an
experiment: the micro-batch run again with larger gradients handed out. An adaptive weight or an
adversarial input that is made of them changes what is trained, and is left in peace.

Labels can be padding. A text of 5 tokens that is filled up to 24 is asked for 19 of padding, which
a model learns first: a loss of 4.4 is one of 1.5 then. Labels that are -100 are ignored by torch's
losses. That padding counts is seen by an experiment: the micro-batch run again without it.

A target can be no probability. The term of a binary cross entropy is log(1 + exp(s)) - t s for a
logit s and a target t: for t = -100, by which a label that is not known is often marked, it falls
with s, 100 times as fast and without end, and the loss goes below 0. So does it for ids of classes,
2 and up. That these places count is seen by an experiment: other targets there, and another loss.
Targets a little beyond 0 and 1, from -0.5 to 1.5, are left in peace: noise smooths labels.

Targets can be 0 and 1 where -1 and 1 are asked for. `soft_margin_loss` is log(1 + exp(-y s)): for
a target y of 0 that is log(2) whatever the output s is, without a gradient, and nothing pulls an
output down. So it is of a hinge, or of `logsigmoid(y * s)`, that are written by hand. It is told
where the loss only falls as one number in the place of all outputs rises: a mask of pairs, whose
scores are differences, is left in peace, and so are 0 beside -1 and 1. `cosine_embedding_loss` and
`hinge_embedding_loss` ask which targets are 1 and which are -1: pairs of 0 are never pushed apart,
and all comes to one point. That both are asked for is seen in the comparisons, that it matters by
an experiment: -1 in the place of 0, and another loss.

Targets can be out of reach. A tanh, a sigmoid or a ReLU at the end of a model keeps its outputs
between bounds: of targets that are standardised, a sigmoid cannot come to the half below 0. The
loss falls to the distance between target and bound, and stays there. It is told where the outputs,
as a function of one number in the place of the product behind them, stay between bounds that other
weights do not widen, and the loss is least at the targets, and higher at what of them lies between
the bounds. Targets that noise takes a little beyond are left in peace.

A label of a CTC loss can be its blank, usually as padding with the number 0 that nobody has taken
out. The blank stands between letters and spells none: asked for as a letter it has to be left and
come to once more for each label, and the loss is smallest for paths that no recording has. torch
computes something and says nothing; the labels of a call are counted.

A target of a KL divergence can be a logarithm already. `kl_div` computes p log(p) of its target,
which has no value below 0: of log-probabilities the loss is NaN in the first step, while the
gradient, which asks for no logarithm, is finite and wrong: the update is applied. With
`log_target=True` it computes exp(t) (t - x): of a target t of probabilities that weighs each class
by exp(t), between 1 and e, and the loss is least for a model that is next to uniform.

## Example
```python
import torch
from torch.nn.functional import cross_entropy, softmax

logits = torch.tensor([[9.0, 0.0, 0.0]])                # sure, and right
right = torch.tensor([0])
cross_entropy(logits, right)                            # tensor(0.0002)
cross_entropy(softmax(logits, -1), right)               # tensor(0.5516)
```

## Fix
1. Give the objective what the layer before the softmax (or sigmoid) makes, and take the softmax for
   predictions only. Cost: none.
2. Where probabilities are all there is: `nll_loss(p.clamp(min=1e-12).log(), labels)`, and
   `binary_cross_entropy(p, labels)`. Cost: less exact for small probabilities, and no gradient for
   those below 1e-12 (in float16, where 1e-12 is 0, Inf); a sigmoid that is 0 or 1 has none either.
3. Scores before `nll_loss`: `log_softmax` them, or use `cross_entropy`. Cost: none.
4. Outputs [N, 1] against targets [N]: `outputs.squeeze(-1)`, or `targets[:, None]`. Cost: none.
5. A reference of its own: `copy.deepcopy(policy)` before the first update. Cost: a model's memory.
6. Turn the mask, with `~` or `1 - mask`, where it is made. Cost: none.
7. `torch.autograd.grad(..., create_graph=True)` for a penalty. Cost: a backward of the backward.
8. `labels[attention_mask == 0] = -100`: where the token that pads is the one that ends a text, the
   end stays. A CTC loss takes the lengths of the texts instead. Cost: none.
9. `kl_div(..., log_target=True)` for a target of logarithms, and only for one. Cost: none.
10. `2 * targets - 1` for losses that ask for -1 and 1. Cost: none.
11. `is_causal=True`, or a mask of booleans, in attention: `mask.bool()`. Cost: none.
12. Leave out what bounds outputs, or scale the targets to lie between the bounds. Cost: none.

## Fix safety
All of them change training, to what the objective is meant to be. The loss is on another scale
afterwards: compare accuracies, not losses.

## Not to be confused with
NS207: the logarithm of a probability that has underflowed, which is not finite. A softmax of a
teacher is a target, not an input, and right there. NS701: one class alone, whose softmax is 1
whatever the model says. Distances between two samples are of all pairs on purpose, and their order
is nothing to them: with `targets[None, :]` that is written down, and nothing is said. NS208: texts
that are read at the padding behind them, with a mask that is right.

## References
- https://github.com/Lightning-Universe/lightning-bolts/issues/654
- https://github.com/ariecattan/SciCo/issues/2
- https://github.com/gitabcworld/MatchingNetworks/issues/5
- https://github.com/bkitano/llama-from-scratch/issues/5
- https://github.com/pytorch/pytorch/issues/16045
"""

from __future__ import annotations

import math

from nanstop.diagnose.evidence.descent import operand
from nanstop.diagnose.evidence.objective import INSTEAD
from nanstop.diagnose.evidence.reading import WRITTEN, first_bad, sighting
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Change, Diagnosis, Evidence, ObjectiveRow, op_name
from nanstop.records.vocabulary import IGNORED_LABEL

_LEFT_OUT = (
    f"no binary cross entropy leaves out {IGNORED_LABEL}: weigh such places with 0 and give them a "
    "target of 0: weight=(labels >= 0).float(), labels.clamp(min=0)"
)
_ONE_COLUMN_EACH = (
    "give it a column of 0 and 1 for each class (torch.nn.functional.one_hot), or take "
    "cross_entropy for ids of classes"
)
_NO_BLANK = (
    "give the loss the lengths of the texts without their padding; no letter may have the number "
    "of the blank"
)
_LOG_TARGET = (
    "Say so, where it is the target of a KL divergence: `kl_div(..., log_target=True)`; or give it "
    "probabilities: softmax in place of log_softmax, or `.exp()`."
)


def check(evidence: Evidence) -> Diagnosis | None:
    """Return the finding if an objective read what it should not, also with other weights."""
    rows = evidence.probe.objective if evidence.probe is not None else ()
    odd = [row for row in rows if row.given not in ("one_class", "own_mean", "own_copy")]
    if not odd:
        return None
    first, *others = odd
    if first.given == "every_pair":
        return _paired(evidence, first)
    if first.given in INSTEAD:
        return _measured(evidence, first)
    of_targets = {"beyond": _beyond, "blanks": _blanks}.get(first.given)
    if of_targets is not None:
        return of_targets(evidence, first)
    return Diagnosis(
        code="NS118",
        title=f"`{op_name(first.op)}` is fed with {_given(first)}",
        cause=_cause(first),
        confidence="likely" if first.given == "scores" or _is_bounded(first) else "certain",
        confirmed=_confirmed(first),
        lines=(
            *((f"made at {first.line}",) if first.line else ()),
            *(f"also `{op_name(row.op)}`: {_given(row)}, {row.line}" for row in others),
            _advice(first),
        ),
        where=first.module,
        seen=sighting(evidence, "loss", op=first.op),
    )


def _logarithms(evidence: Evidence) -> Diagnosis | None:
    """Return the finding of a target whose logarithm is taken where it is one already."""
    event, _ = first_bad(evidence, WRITTEN)
    read = operand(event, 0) if event is not None and event.name in ("xlogy", "log") else None
    if event is None or read is None or not read.is_a("log_probability"):
        return None
    return Diagnosis(
        code="NS118",
        title=f"`{op_name(event.op)}` is fed with logarithms of probabilities",
        cause="the logarithm of p is taken of what is log(p) already, and below 0",
        confidence="certain",
        usual_cure=_LOG_TARGET,
        where=event.module,
    )


def confirm(evidence: Evidence) -> Change | None:
    """Return that the target is taken for what it is the logarithm of."""
    return Change(kind="exponentiate", operand=0) if evidence.incident is not None else None


def _paired(evidence: Evidence, row: ObjectiveRow) -> Diagnosis:
    """Return the finding of outputs that are compared with the targets of all rows."""
    return Diagnosis(
        code="NS118",
        title="each output is compared with the targets of all rows",
        cause=f"{row.width} outputs and {row.width} targets of unlike shapes make "
        f"{row.width} x {row.width} pairs",
        confidence="likely",
        confirmed="with targets in another order the loss is the same",
        lines=(
            *((row.line,) if row.line else ()),
            "bring both to one shape: outputs.squeeze(-1), or targets[:, None]",
            "where all pairs are meant, targets[None, :] says so",
        ),
        where=row.module or "loss",
        seen=sighting(evidence, "loss", op=row.op),
    )


def _beyond(evidence: Evidence, row: ObjectiveRow) -> Diagnosis:
    """Return the finding of a binary cross entropy with targets that are no probabilities."""
    ignored = row.width == IGNORED_LABEL
    return Diagnosis(
        code="NS118",
        title="a binary cross entropy is given targets beyond 0 and 1",
        cause=f"a target is {row.width}: the further its logit moves, the smaller the loss is, "
        "without end",
        confidence="certain",
        confirmed="with others in their place the loss is another one",
        lines=tuple(filter(None, (row.line, _LEFT_OUT if ignored else _ONE_COLUMN_EACH))),
        where=row.module or "loss",
        seen=sighting(evidence, "loss", op=row.op),
    )


def _blanks(evidence: Evidence, row: ObjectiveRow) -> Diagnosis:
    """Return the finding of texts that hold what stands for no letter."""
    return Diagnosis(
        code="NS118",
        title="a CTC loss is asked for its blank",
        cause=f"labels that are the blank, which spells nothing: {row.width}",
        confidence="certain",
        lines=tuple(filter(None, (row.line, _NO_BLANK))),
        where=row.module or "loss",
        seen=sighting(evidence, "loss", op=row.op),
    )


def _measured(evidence: Evidence, row: ObjectiveRow) -> Diagnosis:
    """Return the finding of a model or a policy that is given something else than it is meant to
    be, as an experiment has shown.
    """
    title, cause, confirmed, advice = INSTEAD[row.given]
    return Diagnosis(
        code="NS118",
        title=title,
        cause=cause,
        confidence="likely",
        confirmed=confirmed,
        lines=tuple(filter(None, (*row.made_at, row.line, advice))),
        where=row.module or "loss",
        seen=sighting(evidence, "loss", op=row.op),
    )


def _given(row: ObjectiveRow) -> str:
    if row.given == "every_pair":
        return "every pair of outputs and targets"
    if _is_bounded(row):
        return "scores between 0 and 1"
    named = {"scores": "scores", "across": "probabilities along another dimension"}
    return named.get(row.given, "probabilities")


def _is_bounded(row: ObjectiveRow) -> bool:
    """Return whether a softmax is taken of numbers that do not reach beyond 0 and 1."""
    return row.given == "between_0_and_1" and op_name(row.op) == "_log_softmax"


def _confirmed(row: ObjectiveRow) -> str:
    if row.given == "scores":
        return ""
    if _is_bounded(row):
        return "with scores beyond 0 and 1 the loss is lower than any between them allow"
    return "the same with other weights"


def _is_likelihood(row: ObjectiveRow) -> bool:
    name = op_name(row.op)
    return "nll" in name or "ctc" in name or "kl_div" in name


def _cause(row: ObjectiveRow) -> str:
    least = math.log1p((row.width - 1) / math.e)
    if _is_bounded(row):
        return f"every score is between 0 and 1: the loss cannot fall below {least:.3g}"
    if row.given == "between_0_and_1":
        return "every value is between 0 and 1: its sigmoid is between 0.5 and 0.73"
    if row.given == "scores":
        return "no logarithm of a probability: some are above 0, and the loss has no lower bound"
    if row.given == "across":
        return f"rows of {row.width} do not sum to 1; numbers along another dimension do"
    if _is_likelihood(row):
        return f"rows of {row.width} sum to 1: they are no logarithms"
    return f"rows of {row.width} sum to 1: the loss cannot fall below {least:.3g}"


def _advice(row: ObjectiveRow) -> str:
    if row.given == "scores":
        return "take their log_softmax first, or use cross_entropy"
    if row.given == "across":
        return "take the log_softmax along the dimension of the classes"
    if _is_likelihood(row):
        return "take the logarithm: log_softmax in place of the softmax"
    if _is_bounded(row):
        return "leave out what keeps scores between 0 and 1: the objective takes a softmax itself"
    kind = "sigmoid" if row.given == "between_0_and_1" else "softmax"
    return f"leave out the {kind}: the objective takes one itself"


RULE = Rule(
    "NS118",
    "objective-fed-with-the-wrong-thing",
    "the objective is fed with the wrong thing",
    check,
    ("gauge", "incident"),
    confirm=confirm,
    at_failure=_logarithms,
)
