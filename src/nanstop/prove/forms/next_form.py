"""What is tried next where a step fails in another place under forms of lines."""

from __future__ import annotations

from dataclasses import replace

from nanstop.prove.forms.evidence import OTHER_LIMIT
from nanstop.records import Atom, Localization, op_kind
from nanstop.records.line_forms import AND_BACK, GUARDED, OFF_ZERO, form_of

_MOST_LINES = 3


def next_form(
    held: tuple[Atom, ...], place: Localization | None, message: str = ""
) -> tuple[Atom, ...] | None:
    """Return the forms with that of the line where the step fails under them, or of a line that was
    only guarded with its form in log space: the derivative of a logarithm next to 0 has no guard.
    Of lines in float32 the last gives back what is narrow. One behind others that has no form in
    log space is guarded. Guards whose value is not the limit (``message``) come near to it. None
    where there is no other, or they are many.
    """
    if message == OTHER_LIMIT:
        off_zero, _ = OFF_ZERO
        near = tuple(replace(a, value=off_zero) if a.remedy == "form" else a for a in held)
        return near if near != held else None
    event = place.first_bad if place is not None else None
    if event is None or event.source is None or len(held) >= _MOST_LINES:
        return None
    target = f"{event.source.file}:{event.source.line}"
    op = op_kind(event.forward_op or event.op)
    here = [atom.remedy for atom in held if atom.target == target]
    others = tuple(atom for atom in held if atom.target != target)
    if here == ["stable_form"]:
        guarded = Atom(remedy="form", target=target, value=f"{GUARDED}:{op}")
        return (*others, guarded) if others else None
    if here:
        stable = Atom(remedy="stable_form", target=target, value="log_space")
        return (*held, stable) if here == ["form"] else None
    form = form_of(held[0])[0]
    value = f"{form}:{op}" if form in (GUARDED, AND_BACK, "float32") else held[0].value
    if form == AND_BACK:  # only what comes last is narrow again
        held = tuple(replace(one, value=f"float32:{form_of(one)[1]}") for one in held)
    return (*held, replace(held[0], target=target, value=value))
