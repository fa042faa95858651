"""What a micro-batch has in objects of other classes: a batch of graphs, of boxes, of a script's
own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanstop.numerics.nested import named_in_objects, tables_in


def given_in_objects(micro: Any) -> dict[str, Tensor]:
    """Return the tensors in such objects among what the models of a micro-batch are called with, as
    far as its calls were recorded. No run has others in their place.
    """
    found: dict[str, Tensor] = {}
    for call in _model_calls(micro):
        for name, one in named_in_objects(call.function, call.args, call.kwargs, Tensor):
            found.setdefault(name, one)  # what an object keeps of its own comes later
    return found


def tables_given(micro: Any) -> list[dict[Any, Any]]:
    """Return the tables of such objects: what a run puts there is the script's."""
    tables = (
        table
        for call in _model_calls(micro)
        for one in (*call.args, *call.kwargs.values())
        if not isinstance(one, (Tensor, tuple, list, dict))
        for table in tables_in(one, Tensor)
    )
    return list({id(table): table for table in tables}.values())


def _model_calls(micro: Any) -> list[Any]:
    """Return the calls of models that were recorded, none where nothing was."""
    tape = getattr(micro, "tape", None)
    return [call for call in tape.needed() if call.rng is not None] if tape is not None else []


def put_there(before: dict[str, Tensor], after: dict[str, Tensor]) -> frozenset[str]:
    """Return the names under which a run has left a tensor of its own in what it was given: an
    error for each sample, which is no part of the batch. In place of one that was given, too: what
    is there after a step is not what the step has read.
    """
    return frozenset(name for name, one in after.items() if one is not before.get(name))
