"""What rules say and read of an objective: what it is given in the place of what it expects, and
its series.
"""

from __future__ import annotations

import math
from statistics import median

from nanstop.diagnose.evidence.reading import series_values
from nanstop.records import Evidence

INF, NAN, UNSCORED = "reward_inf/", "reward_nan/", "reward_unscored"
HUGE, LARGEST_REWARD = "reward_huge/", 1.8e19
"""Those beyond which float32 has no square of a reward, of which deviations are made."""
"""Share of a batch of rewards that was bad, by reward function; noted of bad batches only."""
REWARDS_APART, ANSWERS_APART = "rewards_apart", "answers_apart"
"""Share of the groups in which a reward function tells answers apart; where none does, the share of
those whose answers are not all the same.
"""
RATIO_AT_ONCE, RATIO = "log_ratio/at_once", "log_ratio/later"
"""Mean distance of log-probabilities to those noted, before any update and after one."""

_ROWS = "other embeddings from one place on change the rows that read it"
INSTEAD = {
    "own_token": (
        "labels are not shifted",
        "every label is the last token that its row has read: the model learns to repeat it",
        _ROWS,
        "logits[:, :-1] against labels[:, 1:], or leave the shift and decoder_input_ids to a model",
    ),
    "later_token": (
        "labels are shifted twice",
        "every label stands two places or more after the last token that its row has read",
        _ROWS,
        "shift once: models of transformers shift labels themselves",
    ),
    "ahead": (
        "each output has read what it is asked for",
        "each row hangs on the token that it is asked for: the model learns to copy it",
        "with other embeddings in the second half of each text those of the first half change",
        "hide what comes after: is_causal=True, or a mask of booleans, for one of numbers is added",
    ),
    "itself": (
        "the policy is compared with itself",
        "its distance to the reference is exactly 0 in update after update",
        "the reference follows the policy's weights",
        "give the reference weights of its own: copy.deepcopy(policy), before any update",
    ),
    "padding": (
        "texts are hidden and their padding is read",
        "outputs hang on the padding, and on no token of a text beside their own",
        "other embeddings of the padding change them, those of texts do not",
        "turn the mask: key_padding_mask of torch is True, attention_mask 0 where nothing is read",
    ),
    "padded_labels": (
        "padding is trained on",
        "labels are the padding token at the ends of rows, and the loss counts them",
        "without these labels the loss is another one",
        "make labels of padding -100, which torch's losses ignore",
    ),
    "unheard": (
        "a part of the loss that is made of gradients has none",
        "gradients that are asked for without a graph change the loss, and nothing that is trained",
        "with larger ones the loss is another one, and each gradient of a weight the same",
        "ask for them with create_graph=True",
    ),
    "unsigned": (
        "targets are 0 and 1 where -1 and 1 are asked for",
        "a target of 0 has no gradient: nothing asks for a low output",
        "with one number in the place of all outputs the loss only falls as that rises",
        "it takes -1 and 1: 2 * targets - 1; for 0 and 1 take binary_cross_entropy_with_logits",
    ),
    "mixed": (
        "scores of several rows are compared with each other",
        "a row of the loss holds pieces of several rows: none of them can be right",
        "other scores in one row of the head change several rows of the loss, each in part",
        "scores.transpose(1, 2) has two dimensions change places; view and reshape do not",
    ),
    "never_below": (
        "targets are 0 and 1 where -1 and 1 are looked for",
        "no target is -1, and those of 0 are neither: what they mark as unlike stays as near",
        "with -1 in the place of 0 the loss is another one",
        "give the loss 2 * targets - 1",
    ),
    "out_of_reach": (
        "outputs are kept from their targets",
        "what ends the model bounds its outputs, and targets lie beyond: the loss stays there",
        "with the targets in place of outputs the loss is lower than any outputs allow",
        "leave out what bounds them (a tanh, a sigmoid, a ReLU at the end), or scale the targets",
    ),
}
"""What an experiment has shown an objective or a model to be given: what is said of it, why, how it
was shown, and what helps.
"""


def named(evidence: Evidence, beginning: str) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return the series whose names begin with a prefix, by the rest of their names."""
    histories = evidence.series or (evidence.incident.history if evidence.incident else ())
    return {
        one.name.removeprefix(beginning): tuple(zip(one.steps, one.values, strict=False))
        for one in histories
        if one.name.startswith(beginning)
    }


def typical(evidence: Evidence, name: str, *, last: int = 8, least: int = 1) -> float | None:
    """Return the median of the last values of a series, None where it has fewer than ``least``."""
    values = [value for _, value in series_values(evidence, name) if not math.isnan(value)][-last:]
    return median(values) if len(values) >= least else None
