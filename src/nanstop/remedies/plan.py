"""A precision plan in force: the remedies that carry it out on a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nanstop.errors import NanstopError, unknown
from nanstop.numerics.tensors import HALF
from nanstop.records import Atom, PrecisionPlan
from nanstop.remedies.apply import applied
from nanstop.remedies.storage import stored_in
from nanstop.replay.step import ModelView

_WRAPPERS = ("_orig_mod.", "module.", "base_model.model.", "base_layer.")
"""What compiled modules, data parallelism and PEFT put into the names of what they wrap."""


@contextmanager
def planned(view: ModelView, plan: PrecisionPlan) -> Iterator[None]:
    """Have a plan in force; on exit all is bitwise as before. Errors: those of ``atoms_of``."""
    with applied(view, atoms_of(plan, view)):
        yield


def atoms_of(plan: PrecisionPlan, view: ModelView) -> tuple[Atom, ...]:
    """Return the remedies that carry a plan out on a model, whatever wraps it by now.

    Errors: ``NanstopError`` for a plan that says that there is none, and for a module that the
    model does not have.
    """
    if plan.reason:
        raise NanstopError(
            f"there is no {plan.dtype} plan for {plan.model or 'this model'}: {plan.reason}"
        )
    islands = [
        Atom(remedy="island", target=name, value=region.dtype)
        for region in plan.regions
        for name in _named(region.modules, view)
    ]
    outer = [Atom(remedy="outer_autocast", value=plan.dtype)] if plan.dtype else []
    return (
        *outer,
        *islands,
        *_of_storage(plan, view),
        *_of_scaler(plan, view),
        *(_renamed(atom, view) for atom in plan.remedies),
    )


def _of_storage(plan: PrecisionPlan, view: ModelView) -> Iterator[Atom]:
    if plan.attention and plan.attention != view.attention():
        yield Atom(remedy="attention", value=plan.attention)
    if plan.trainables == "float32" and any(p.requires_grad for p in stored_in(view, HALF)):
        yield Atom(remedy="fp32_trainables")
    if plan.logits == "float32" and plan.dtype:
        yield Atom(remedy="fp32_logits")


def _of_scaler(plan: PrecisionPlan, view: ModelView) -> Iterator[Atom]:
    scaler = view.scaler
    if plan.scaler is None or scaler is None or not scaler.is_enabled():
        return
    factor = plan.scaler.init_scale / scaler.get_scale()
    if factor != 1.0:
        yield Atom(remedy="loss_scale", value=repr(factor))


def _named(modules: Sequence[str], view: ModelView) -> Iterator[str]:
    """Yield the names that the model has for the modules of a plan."""
    present = {name for name, _ in view.root.named_modules()}
    bare = _bare(present)
    for name in modules:
        if name in present:
            yield name
        elif _stripped(name) in bare:
            yield bare[_stripped(name)]
        else:
            raise unknown("module in the plan", name, sorted(bare))


def _renamed(atom: Atom, view: ModelView) -> Atom:
    """Return an atom with the name that the model has for its module; any other as it is."""
    if atom.remedy != "island" or not atom.target:
        return atom
    present = {name for name, _ in view.root.named_modules()}
    if atom.target in present:
        return atom
    return replace(atom, target=_bare(present).get(_stripped(atom.target), atom.target))


def _bare(names: set[str]) -> Mapping[str, str]:
    """Return names by what they are without any wrapper; of several the outermost."""
    found: dict[str, str] = {}
    for name in sorted(names, key=len):
        found.setdefault(_stripped(name), name)
    return found


def _stripped(name: str) -> str:
    """Return a module's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = f".{name}.".replace(f".{wrapper}", ".")[1:-1]
    return name
