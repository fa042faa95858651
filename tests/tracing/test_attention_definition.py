"""The definition of fused attention, against autograd's own derivatives and real kernels."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.tracing.definitions.attention import defined
from nanstop.tracing.definitions.once_more import rerun_reference, rerun_wider


class Calls(TorchDispatchMode):
    """Keeps each operation of attention with its operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in str(func):
            self.seen.append((func, args, kwargs or {}, result))
        return result


def called(query, key, value, **options):
    """Return the forward and the backward operation of one attention."""
    leaves = [one.requires_grad_() for one in (query, key, value)]
    with Calls() as calls:
        out = functional.scaled_dot_product_attention(*leaves, **options)
        out.backward(torch.randn(out.shape, dtype=out.dtype))
    forward, backward = calls.seen
    return forward, backward


def drawn(heads=4, groups=4, length=12, dtype=torch.float32):
    torch.manual_seed(0)
    query = torch.randn(2, heads, length, 8, dtype=dtype)
    return query, *(torch.randn(2, groups, length, 8, dtype=dtype) for _ in range(2))


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(12, 12, dtype=torch.bool).tril()},
    "float": {"attn_mask": torch.linspace(-3.0, 3.0, 144).view(1, 1, 12, 12)},
    "scale": {"scale": 0.3},
}


def same(operand):
    return operand


@pytest.mark.parametrize("mask", MASKS)
def test_it_is_what_the_kernels_compute(mask):
    for func, args, kwargs, result in called(*drawn(), **MASKS[mask]):
        made = defined(func, args, kwargs)(same)
        for mine, its in zip(made, result, strict=False):
            torch.testing.assert_close(mine, its)


def test_heads_that_share_keys():
    query, key, value = drawn(heads=4, groups=2)
    (_, backward) = called(*drawn(), is_causal=True)
    func, args, kwargs, _ = backward
    given = list(args)
    given[1:4] = query, key, value
    made = defined(func, tuple(given), kwargs)(same)
    leaves = [one.double().requires_grad_() for one in (query, key, value)]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(args[0].double())
    for mine, leaf in zip(made, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad.float(), atol=1e-5, rtol=1e-5)


def test_what_a_kernel_alone_gets_wrong_is_finite_by_the_definition():
    (_, (func, args, kwargs, result)) = called(*drawn(), is_causal=True)
    bad = tuple(torch.ones_like(one, dtype=torch.bool) for one in result)
    assert rerun_reference(func, args, kwargs, bad) == "finite"
    spoilt = (args[0] * float("inf"), *args[1:])
    assert rerun_reference(func, spoilt, kwargs, bad) == "nonfinite"


def test_a_wider_format_is_that_of_the_definition():
    query, key, value = drawn(dtype=torch.float32)
    ((func, args, kwargs, result), _) = called(1e25 * query, 1e25 * key, value)
    bad = (torch.ones_like(result[0], dtype=torch.bool),)
    assert rerun_reference(func, args, kwargs, bad) == "nonfinite"
    assert rerun_wider(func, args, kwargs, bad) == "finite"


def test_other_operations_have_none():
    assert defined(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}) is None
