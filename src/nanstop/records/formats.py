"""Limits of the floating-point formats that rules reason about, as numbers, without torch."""

from __future__ import annotations

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
HALF = ("float16", "bfloat16")
BY_SHORT_NAME = {"fp16": "float16", "bf16": "bfloat16"}

SMALLEST: dict[str, float] = {
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float32": 2.0**-149,
}
"""Smallest positive (subnormal) value."""

EPSILON: dict[str, float] = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}
"""Distance of 1 to the next larger number."""

WIDER: dict[str, str] = {"float32": "float64", "bfloat16": "float64"}
"""The format with more range in which an op is repeated to learn whether it overflowed."""

_MOST_EXPONENT = {"float16": 10.0}
_LEAST_NUMBER = {"float16": 2.0**-14}
_MARGIN = {"float16": 1e-3, "bfloat16": 8e-3}


def most_exponent(dtype: str) -> float:
    """Return what an exponential's argument is usually kept below, far from where it overflows:
    what is made of exponentials has room.
    """
    return _MOST_EXPONENT.get(dtype, 20.0)


def least_number(dtype: str) -> float:
    """Return what a logarithm's argument is usually kept above."""
    return _LEAST_NUMBER.get(dtype, 1e-8)


def margin(dtype: str) -> float:
    """Return how far from an end of its interval the argument of a function that has a pole there
    is usually kept.
    """
    return _MARGIN.get(dtype, 1e-6)


def wider(dtype: str) -> str:
    """Return the name of the next format with more range."""
    return WIDER.get(dtype, "float32")


def vanishes(value: float, dtype: str) -> bool:
    """Return whether ``value`` rounds to zero in ``dtype``; half its least ties to the even 0."""
    return 0.0 < abs(value) <= SMALLEST.get(dtype, 0.0) / 2


def is_float(dtype: str) -> bool:
    """Return whether ``dtype`` is a floating-point format."""
    return dtype.startswith(("float", "bfloat"))
