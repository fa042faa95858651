"""Which exceptions are numeric failures in disguise."""

from __future__ import annotations

from nanstop.records import Phase

_SIGNATURES = (
    "probability tensor contains either",
    "index out of range in self",
    "out of bounds",
    "device-side assert",
    "unscale fp16 gradients",
    "found inf",
    "found nan",
    "returned nan values",
    "contains nan",
    "non-finite",
    "nonfinite",
    "should be finite",
    "invalid values in its",
    "but found invalid values",
    "should be between 0 and 1",
    "class values must be",
    "without overflow",
    "expects all elements of std",
    "invalid multinomial distribution",
    "not positive-definite",
    "input matrix is singular",
    "failed to converge",
    "does not require grad and does not have a grad_fn",
)


def is_numeric(error: BaseException) -> bool:
    """Return whether an exception says that a value was not finite or out of its range.

    Messages are those of torch ("probability tensor contains either `inf`, `nan` or element < 0",
    "index out of range in self", "Attempting to unscale FP16 gradients.", a distribution's "but
    found invalid values", binary cross entropy's "all elements of input should be between 0 and
    1", one hot's "Class values must be non-negative.", "value cannot be converted to type at::Half
    without overflow", what sampling and linear algebra ask of their operands), of CUDA asserts and
    of anomaly detection; and autograd's, that a loss leads to nothing that is trained.
    """
    if isinstance(error, (FloatingPointError, ZeroDivisionError, OverflowError)):
        return True
    text = str(error).lower()
    if any(signature in text for signature in _SIGNATURES):
        return True
    # A library that says it in its own words (``raise ... from error``) names what it had caught.
    return error.__cause__ is not None and is_numeric(error.__cause__)


def phase_of(error: BaseException) -> Phase:
    """Return ``backward`` if the exception passed through a backward call, else ``forward``."""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name == "backward":
            return "backward"
        traceback = traceback.tb_next
    return "forward"
