"""The graph that autograd keeps behind a tensor. No device work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def nodes_behind(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph of some tensors, each once, in the same order each time."""
    waiting = list(dict.fromkeys(one.grad_fn for one in tensors if one.grad_fn is not None))
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def leaves_of(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors that a backward through some nodes may give a gradient."""
    for node in nodes:
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def is_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf of the graph.

    A view that was made under ``no_grad`` is none once its memory was written to: torch refuses to
    say then (https://github.com/pytorch/pytorch/issues/11390).
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def node_of(tensor: Tensor) -> Any:
    """Return the node of the graph that has made a tensor; None where none has, or torch refuses to
    say (``is_leaf``).
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
