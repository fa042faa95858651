"""Facts about modules, hung into the tree that the modules' names make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MOST = 40
MOST_DEEP = 24
"""Facts of one tree, and parts of a name that are levels of it."""


@dataclass(frozen=True, slots=True)
class Fact:
    """``kind``: its class on the page. ``share``: how full a bar is, from 0 to 1; None: no bar.
    ``lead``: its number in an order.
    """

    text: str
    kind: str = ""
    share: float | None = None
    source: str = ""
    lead: str = ""


@dataclass(slots=True)
class Node:
    """``name``: the last words of the module's name, from its parent's on."""

    name: str
    facts: list[Fact] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)


def module_tree(facts: Iterable[tuple[str, Fact]], root: str = "the model") -> Node:
    """Return the tree of the modules that the last facts name, in the order of their first naming.

    A module without facts that leads to one module alone shares a node with it.
    """
    top = Node(root)
    for module, fact in list(facts)[-MOST:]:
        node = top
        for word in module.split(".", MOST_DEEP) if module else ():
            node = _child(node, word)
        node.facts.append(fact)
    for child in top.children:
        _join(child)
    return top


def _child(node: Node, word: str) -> Node:
    for child in node.children:
        if child.name == word:
            return child
    node.children.append(Node(word))
    return node.children[-1]


def _join(node: Node) -> None:
    while not node.facts and len(node.children) == 1:
        only = node.children[0]
        node.name = f"{node.name}.{only.name}"
        node.facts, node.children = only.facts, only.children
    for child in node.children:
        _join(child)
