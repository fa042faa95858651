"""The closed vocabularies of the records."""

from __future__ import annotations

from typing import Literal

RANK = {"certain": 0, "likely": 1, "possible": 2}

SCHEMA = 1

ROOM = "room "
"""Of the name of a series of headroom: ``room 0007 float16 model.layers.1.mlp`` is the eighth
module, its values the doublings that its largest output has left in that format.
"""

IGNORED_LABEL = -100
"""What cross entropy leaves out (torch's and transformers' ``ignore_index``)."""
LOSSES_OF_ELEMENTS = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
"""Functions of torch whose mean is over all elements of their operands."""

Phase = Literal["forward", "recompute", "backward", "optimizer", "generate", "loss", "evaluate"]
FailureKind = Literal[
    "nan",
    "+inf",
    "-inf",
    "length",
    "zero_grad",
    "exception",
    "signal",
    "oom",
    "timeout",
    "absorbed",
]
NOT_FINITE: tuple[FailureKind, ...] = ("nan", "+inf", "-inf")
DEATHS: tuple[FailureKind, ...] = ("signal", "oom", "timeout")
"""Failures of a process, whose last operation stands at the end of ``Localization.growth``."""

RANK_ENDED, RANK_ELSEWHERE = "rank ended", "rank elsewhere"
"""How another rank of the same training had left one that waits for it: at its end, or for another
place of the script.
"""

SignalSource = Literal[
    "loss", "grad", "logits", "param", "state", "reward", "exception", "exit", "gauge", "scaler"
]
Origin = Literal[
    "born_here",
    "from_param",
    "from_batch",
    "from_buffer",
    "from_constant",
    "carried_over",
    "from_state",
    "absorbed",
    "unknown",
]
Fidelity = Literal["bitwise", "same_failure", "different", "not_reproduced"]
Finiteness = Literal["finite", "nonfinite", "unknown"]
Descent = Literal[
    "parameter",
    "state",
    "data",
    "ids",
    "constant",
    "mask",
    "count",
    "whole",
    "total",
    "empty",
    "magnitude",
    "square",
    "extreme",
    "norm",
    "deviation",
    "logarithm",
    "exponential",
    "probability",
    "log_sum",
    "log_probability",
    "chosen",
    "log_ratio",
    "ratio",
]
"""What a value was made from (the first five), and what it means by the operations that made it."""
HiddenChoice = Literal["", "row", "chosen", "counted"]
"""How what an infinity hides got into a result: nothing else is left in a row, it is what is picked
from one, or one sums all.
"""
EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
"""Operations whose infinite result of a finite number is too large a number, in whatever format."""
LOOKUPS = ("embedding", "_embedding_bag", "_embedding_bag_forward_only")
LOOKUPS += ("index", "_unsafe_index", "index_select", "gather")
"""Operations that read some rows or places of a tensor, and not the others."""
Confidence = Literal["certain", "likely", "possible"]
ChangeKind = Literal[
    "raise_zeros", "fill_rows", "bound", "unmask", "supervise", "vary", "exponentiate"
]
Outcome = Literal[
    "pass", "same_failure", "other_failure", "crash", "not_applicable", "oom", "timeout"
]
OF_UPDATES = "updates since a snapshot"
"""The scope of a proof that made the updates anew which led to a failure."""
Verdict = Literal["proven", "plausible", "isolated", "none_found"]
Safety = Literal["safe", "changes_training"]
ActionKind = Literal[
    "continue", "redo", "adopt", "skip", "rollback", "quarantine", "stop", "observe"
]
