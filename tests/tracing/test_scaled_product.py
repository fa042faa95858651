"""Products of 8-bit floats by their definition."""

import pytest
import torch

from nanstop.tracing.definitions.scaled_product import scaled_product

V1 = torch.ops.aten._scaled_mm.default
V2 = torch.ops.aten._scaled_mm_v2.default if hasattr(torch.ops.aten, "_scaled_mm_v2") else None
ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")
NARROW = torch.float8_e4m3fn


def operands():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, 32, generator=generator).mul(10).to(NARROW) for _ in range(2))
    return left, right.t()


@pytest.mark.skipif(not ON_CPU, reason="torch multiplies 8-bit floats on a GPU only")
@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shapes", [((), ()), ((16, 1), (1, 16))])
def test_it_is_the_product_that_the_kernel_rounds(form, shapes):
    left, right = operands()
    one, other = (torch.rand(shape) + 0.5 for shape in shapes)
    bias = torch.rand(16).to(form) if form is not torch.float32 else None
    given, kind = (left, right, one, other, bias), {"out_dtype": form}
    result = V1(*given, **kind)
    (exact,) = scaled_product(V1, given, kind)
    (rounded,) = scaled_product(V1, given, kind, own_format=True)
    assert exact.dtype is (torch.float32 if form is torch.float16 else torch.float64)
    assert rounded.dtype is form
    torch.testing.assert_close(rounded, result, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(V2 is None, reason="torch has one form of it alone")
def test_the_newer_form_is_the_same():
    left, right = operands()
    one, other = torch.rand(16, 1), torch.rand(1, 16)
    args = (left, right, [one], [1], [0], [other], [1], [0], None, torch.float16)
    (product,) = scaled_product(V2, args, {})
    torch.testing.assert_close(product.half(), V2(*args), rtol=1e-2, atol=1e-2)
    assert not scaled_product(V2, (left, right, [one], [1], [1], [other], [1], [1], None, None), {})


def test_scales_of_blocks_go_with_their_blocks():
    left, right = torch.ones(4, 8).to(NARROW), torch.ones(8, 2).to(NARROW)
    spans, tiles = torch.tensor([[1.0, 2.0]] * 4), torch.ones(2, 1)
    (product,) = scaled_product(V1, (left, right, spans, tiles), {"out_dtype": torch.float32})
    assert product.unique().tolist() == [4.0 + 8.0]


def test_scales_that_are_laid_out_otherwise_say_nothing():
    left, right = operands()
    flat, single = torch.ones(512), torch.ones(())
    assert not scaled_product(V1, (left, right, flat, single), {"out_dtype": torch.float32})
    assert not scaled_product(torch.ops.aten.mm.default, (left, right), {})
