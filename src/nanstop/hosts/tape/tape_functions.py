"""Functions of torch that a tape treats in a way of their own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

NUMBERS = frozenset((Tensor.item, Tensor.__float__))
LITERALS = frozenset((torch.tensor, torch.as_tensor, torch.from_numpy))
"""What brings numbers into the loss that no op has made: called again, so that its line is seen."""
LOOKS = frozenset(
    {
        *NUMBERS,
        *(
            getattr(owner, f"is{kind}")
            for owner in (torch, Tensor)
            for kind in ("nan", "inf", "finite")
        ),
    }
)
READS = frozenset(
    {
        *NUMBERS,
        *(getattr(Tensor, f"__{kind}__") for kind in ("bool", "int", "index", "array")),
        *(Tensor.tolist, Tensor.numpy, Tensor.is_nonzero, torch.is_nonzero),
    }
)
"""What brings values of a tensor to Python."""
SHAPES = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride),
        *(
            cast("Any", getattr(Tensor, name)).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim")
        ),
    }
)
"""What tells of a tensor what no value of it changes: distributions ask for more of it than they
compute.
"""
GRADIENTS = frozenset((cast("Any", Tensor).grad.__get__, cast("Any", Tensor).grad.__set__))
"""What training changes: a script may well empty the gradients of every parameter itself."""
NOT_REPEATED = frozenset(
    {
        *(getattr(torch, f"{name}_like") for name in ("rand", "randn", "randint")),
        *(
            getattr(owner, name)
            for owner in (torch, Tensor)
            for name in ("bernoulli", "multinomial", "normal", "poisson", "dropout")
            if hasattr(owner, name)
        ),
        functional.dropout,
        functional.gumbel_softmax,
        *GRADIENTS,
    }
)
"""On tensors from outside alone:
what draws numbers (its place in the stream is not known), what training changes.
"""
PLAIN = frozenset(
    {int, float, bool, str, type(None), type(...), slice, torch.dtype, torch.device, torch.Size}
)
AS_IT_IS = PLAIN - {float}
"""What no call can have brought to Python."""
