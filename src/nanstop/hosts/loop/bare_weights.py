"""What an optimizer trains that is in no model: a learned temperature, the weight of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import chain
from typing import Any

from torch import Tensor, nn

from nanstop.hosts.tape.tape_calls import variable_names
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.trained import held_by
from nanstop.replay.step import ModelView


def one_root(roots: Sequence[nn.Module], parameters: Sequence[Tensor]) -> nn.Module:
    """Return the model, or a holder of several and of ``parameters``. A single model's parts have
    the names there that they have in it.
    """
    if len(roots) == 1 and not parameters:
        return roots[0]
    holder = nn.Module()
    if len(roots) == 1:
        for kind in ("_modules", "_parameters", "_buffers"):
            vars(holder)[kind].update(vars(roots[0])[kind])
    for root in roots if len(roots) > 1 else ():
        name = type(root).__name__
        taken = sum(key.startswith(name) for key in holder._modules)
        holder._modules[f"{name}{taken or ''}"] = root
    called = variable_names(of_weights=True) if parameters else {}
    for place, parameter in enumerate(parameters):
        name = called.get(id(parameter), "").replace(".", "_")
        free = name and name not in holder._parameters
        bare: Any = parameter
        holder._parameters[name if free else f"p{place}"] = bare
    return holder


def with_bad_bare(view: ModelView) -> ModelView:
    """Return a view of a model that has, where one of them has a gradient that is not finite, what
    its optimizers train beside it as its own. Synchronises the device where there is any.
    """
    known = set(map(id, view.root.parameters()))
    held = chain.from_iterable(map(held_by, (view.optimizer, *view.others)))
    bare = list({id(p): p for p in held if id(p) not in known}.values())
    if not nonfinite({str(place): p.grad for place, p in enumerate(bare)}):
        return view
    wider: Any = copy(view)
    wider.root = one_root([view.root], bare)
    return wider
