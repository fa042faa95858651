"""What a micro-batch has in objects of other classes: a batch of graphs, of boxes, of a script's
own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanstop.numerics.nested import named_in_objects


def given_in_objects(micro: Any) -> dict[str, Tensor]:
    """Return the tensors in such objects among what the models of a micro-batch are called with, as
    far as its calls were recorded. No run has others in their place.
    """
    tape = getattr(micro, "tape", None)
    if tape is None:
        return {}
    found: dict[str, Tensor] = {}
    for call in tape.needed():
        if call.rng is not None:
            for name, one in named_in_objects(call.function, call.args, call.kwargs, Tensor):
                found.setdefault(name, one)  # what an object keeps of its own comes later
    return found
