"""Other forms of a failing line: what each is called as the value of a remedy, and what a cure of
such forms is. No torch here.

``remedies.forms`` computes them, ``rewrite.forms`` types them.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanstop.records import Atom, Proof

AND_BACK = "and_back"
"""A line in float32 whose result has the format of what it reads wherever another line reads it."""
EACH_AND_BACK = "each_and_back"
"""One that is typed at every value that it reads."""
CARRIED, CARRIED_MATRICES = "carried", "carried_matrices"
"""A line in log space that is typed as logarithms that its loop carries from round to round; those
of products of a matrix and a vector, and of matrices."""
CARRIED_AS = (CARRIED, CARRIED_MATRICES)
UNCAST = "uncast"
"""A line in float32 that leaves out its own casts to half precision."""
FROM_FIRST = "from_first"
"""A line in float32 that is typed at the first of its operations, not at that which fails."""
EACH_READ = "each_read"
"""A line in float32 that is typed at every value that it reads."""
OUT_OF_AUTOCAST = "out_of_autocast"
"""A line in float32 that is typed in a block without autocast, which would round it again."""
FORMS = (
    "stable_form",
    "memory_fill",
    "held_fill",
    "finite_fill",
    "finite_constant",
    "fp32_line",
    "form",
)
"""Remedies that write a failing line in another way."""
GUARDED = "guarded"
"""The value of a guarded form. Where another line failed once the first one passed, it says after a
colon which operation did."""
MASKED = "masked"
"""A guarded form that is typed element by element, where a shorter code gives another value or
another gradient at what is left out.
"""
EVERY = "every"
"""A guarded form that is typed at every operation of the line: once the first one passes, another
may fail."""
INNERMOST = "innermost"
"""A guarded form that is typed where no other operation of its kind stands within: which of several
fails is not known."""
KEPT = "kept"
"""A guarded form that leaves what is infinite so, as a clamp behind it may bound that: it takes
away a derivative there, and has a value for NaN alone."""
FAR = "far"
"""A kept form with a number that is far off in the place of what is infinite: what a clamp bounds
does not tell these apart."""
OTHERWISE = "otherwise"
"""A guarded form that makes another number of what no weight has a part in and has no value: a cure
under which that matters makes up what a model learns from."""
OFF_ZERO = {"off_zero": 1e-6, "farther_off_zero": 1e-5}
"""A guarded form that computes what has no value of a number a little off 0, wherever that is read:
near to the limit there. The second tells whether it has one; the cure is the first.
"""
BOUNDED = "bounded"
"""A form that keeps what an exponential, a logarithm or a function between poles is of within a
usual bound: a number that somebody has to choose wherever the loss hangs on it."""
BETWEEN_POLES = {"atanh": (-1, 1), "erfinv": (-1, 1), "logit": (0, 1), "ndtri": (0, 1)}
"""Functions that are infinite at both ends of an interval and have no value outside of it."""
HAVE_BOUNDS = ("exp", "log", "log2", "log10", *BETWEEN_POLES)
"""Operations that have a bounded form."""
COUNTED = "counted"
"""A quotient by 1 in place of a count of 0."""
OTHER_COUNT = "other_count"
"""By another number there, which tells whether it matters."""
OF_COUNTS = ("div", "true_divide", "reciprocal", "rsqrt", "pow")
"""Operations that may divide by a count."""
MASK_AFTERWARDS = "mask_afterwards"
"""A product that is masked once it is made: what is infinite, and written there as a mask, stays
so whatever it is multiplied by."""
MASK_FAR = "mask_far"
"""One with a number that is far off in the mask's place: what reads a mask does not tell these
apart."""
OTHER_BOUND = "other_bound"
"""A bounded form with another bound, which tells whether it matters."""
BY_NUMBER = "by_number"
"""A guarded form of a quotient whose divisor is a number of Python's, or one of NumPy's."""
BY_ARRAY = "by_array"
"""A guarded form of a quotient whose divisor is an array of NumPy's."""
NUMBERED = ("memory_fill", "finite_fill", "finite_constant")
"""Forms whose value is a number in place of one that is not finite, or that nobody has written."""
FINITE = {"1e4": "2e4", "0": "1"}
"""Such numbers: one so large that the exponential of its opposite is 0, of which float16 holds the
sum of two, and one for what is left out of a sum. Each with the number that tells whether it
matters which; the cure is the first.
"""
FARTHER = ("30", "-30")
"""What is tried besides in place of data that is not finite: a loss that ends at a bound may not
tell 0 from 1. Their exponentials are within the range of float32.
"""
UNEVEN = "uneven"
"""In place of each place's number one of its own: what is the same throughout a row is nothing
behind a normalisation of that row, whatever it is.
"""
FINITE_NUMBERS = (*FINITE, *FINITE.values(), *FARTHER)


def leaves_values_out(atom: Atom) -> bool:
    """Return whether it shows that a script leaves out what is not finite: its data is not at
    fault.
    """
    return atom.remedy == "finite_constant"


def form_of(atom: Atom) -> tuple[str, str]:
    """Return the form that the value of another form of a line names, and for which operation, ""
    where it is for all of them.
    """
    form, _, op = atom.value.partition(":")
    return form, op


def form_at(target: str, value: str) -> Atom:
    """Return the form of a line that has a value, or that a number in place of infinities is."""
    return Atom(remedy="finite_fill" if value in FINITE else "form", target=target, value=value)


def is_bounded(atoms: Iterable[Atom]) -> bool:
    """Return whether a cure keeps something within a bound that somebody chose."""
    chosen = (BOUNDED, COUNTED)
    return any(atom.remedy == "form" and form_of(atom)[0] in chosen for atom in atoms)


def typed_cure(proof: Proof) -> tuple[Atom, ...]:
    """Return the cure as somebody types it: what leaves data out is no code, a bound beside it that
    passes is, or else a guard; a module in float32 is a few lines of its own, where these are the
    script's.
    """
    if proof.verdict == "isolated":
        passing = [one.atoms for one in proof.alternatives if one.passed == one.runs]
        beside = sorted(filter(are_guards, passing), key=is_bounded, reverse=True)
        return next(iter(beside), proof.minimal)
    return lines_of_modules(proof) or proof.minimal


def lines_of_modules(proof: Proof) -> tuple[Atom, ...]:
    """Return the lines in float32 that are typed for a cure that is modules in float32, and are as
    good; none where the modules are typed.
    """
    are_modules = all(atom.remedy == "island" for atom in proof.minimal)
    return proof.typed or () if are_modules and proof.minimal else ()


def is_typed_beside(proof: Proof | None) -> bool:
    """Return whether what is typed is another cure than the one that holds."""
    if proof is None or lines_of_modules(proof):
        return False
    return typed_cure(proof) != proof.minimal


def are_forms(atoms: tuple[Atom, ...]) -> bool:
    """Return whether a cure is nothing but other forms of lines."""
    return bool(atoms) and all(atom.remedy in FORMS for atom in atoms)


def are_guards(atoms: tuple[Atom, ...]) -> bool:
    """Return whether a cure does nothing but give lines a value where they have none."""
    return bool(atoms) and all(atom.remedy == "form" for atom in atoms)
