"""The second look at an op: wider format, reference, masks, patched elements."""

import math

import pytest
import torch
from torch.nn import functional as F

from nanstop.tracing.op_details import Observer, fully_masked_rows, is_masking, storage_names
from nanstop.tracing.op_patches import Patch, SecondRun, Spot

NAN, INF = float("nan"), float("inf")
aten = torch.ops.aten


def looked(function, index=0, names=None):
    observer = Observer({index}, storage_names(names or {}))
    with SecondRun(observer):
        result = function()
    return observer.seen.get(index), result


def test_wider_of_a_half_product():
    half = torch.full((3,), 300.0, dtype=torch.float16)
    seen, _ = looked(lambda: half * half, names={"h": half})
    assert (seen.op, seen.wider, seen.bad[0].all()) == ("aten.mul.Tensor", "finite", True)
    assert [stats.name for stats in seen.inputs] == ["h", "h"]
    assert seen.outputs[0].posinf == 3


def test_wider_of_a_cast_that_names_its_format():
    wide = torch.tensor([1e5, 1.0])
    assert looked(lambda: wide.half())[0].wider == "finite"
    assert looked(lambda: wide.to(torch.float8_e5m2))[0].wider == "finite"
    assert looked(lambda: (wide * INF).half(), index=1)[0].wider == "nonfinite"


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
    reason="torch multiplies 8-bit floats on a GPU only",
)
@pytest.mark.parametrize(("scale", "wider"), [(1e36, "finite"), (math.inf, "nonfinite")])
def test_wider_of_a_product_of_8_bit_floats_is_its_definition(scale, wider):
    one, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.tensor(scale)
    many, form = torch.tensor(1e3), torch.bfloat16
    seen, _ = looked(lambda: torch._scaled_mm(one, one.t(), scales, many, out_dtype=form))
    assert (seen.op, seen.wider, seen.reference) == ("aten._scaled_mm.default", wider, "nonfinite")


def test_wider_of_an_op_in_place_uses_the_old_operand():
    values = torch.full((3,), 300.0, dtype=torch.float16)
    seen, _ = looked(lambda: values.mul_(300.0))
    assert (seen.wider, seen.inputs[0].absmax, seen.outputs[0].posinf) == ("finite", 300.0, 3)


def test_wider_uses_the_same_random_numbers():
    torch.manual_seed(0)
    _, first = looked(lambda: F.dropout(torch.ones(64) * INF, 0.5), index=1)
    torch.manual_seed(0)
    assert torch.equal(first.isnan(), F.dropout(torch.ones(64) * INF, 0.5).isnan())


def test_op_that_raises_keeps_its_operands():
    table = torch.ones(4, 2)
    observer = Observer({0}, {})
    with pytest.raises(IndexError), SecondRun(observer):
        F.embedding(torch.tensor([9]), table)
    assert [stats.shape for stats in observer.seen[0].inputs] == [(4, 2), (1,)]
    assert observer.seen[0].outputs == ()


def test_reference_of_attention():
    q = torch.randn(1, 2, 4, 8)
    values = q.clone()
    values[0, 0, 0, 0] = NAN
    seen, _ = looked(lambda: F.scaled_dot_product_attention(q, q, values))
    assert "scaled_dot_product" in seen.op
    assert seen.reference == "nonfinite"


def causal(size):
    lowest = torch.finfo(torch.float16).min
    return torch.full((size, size), lowest, dtype=torch.float16).triu(1)


def test_mask_at_the_lowest_value_is_meant():
    mask = causal(4)
    scores = torch.full((4, 4), -100.0, dtype=torch.float16)
    assert is_masking("add", [scores, mask], [scores + mask])
    assert is_masking("add", [scores, mask + mask], [scores + mask + mask])
    temperature = torch.tensor(0.5, dtype=torch.float16)
    assert is_masking("div", [mask, temperature], [mask / temperature])
    assert not is_masking("mul", [scores, scores], [-scores * scores * 100])
    assert not is_masking("exp", [mask], [scores + mask])


def test_mask_of_a_wider_format_is_meant():
    mask = torch.rand(4, 4).masked_fill(causal(4) != 0, torch.finfo(torch.float32).min)
    assert is_masking("_to_copy", [mask], [mask.half()])
    mask[3, 0] = -7e4  # a score of its own
    assert not is_masking("_to_copy", [mask], [mask.half()])
    for infinity in (INF, -INF):
        mask[3, 0] = infinity
        assert not is_masking("_to_copy", [mask], [mask.half()])


@pytest.mark.parametrize("extreme", [-65000.0, 65000.0])
def test_overflow_beside_a_mask_is_not_meant(extreme):
    scores = torch.full((4, 4), 10.0, dtype=torch.float16)
    scores[3, 1] = extreme
    shifted = causal(4) + torch.full((4, 4), extreme / 10, dtype=torch.float16).tril()
    assert not is_masking("add", [scores, shifted], [scores + shifted])


def test_residual_with_few_outliers_is_no_mask():
    residual = torch.tensor([[1.0, -62000.0], [-64000.0, 3.0]], dtype=torch.float16)
    update = torch.full((2, 2), -5000.0, dtype=torch.float16)
    assert not is_masking("add", [residual, update], [residual + update])


def test_fully_masked_rows():
    scores = torch.zeros(2, 3, 4)
    scores[:, 1] = -INF
    scores[0, 2, :3] = -INF
    assert fully_masked_rows([torch.ones(2), scores]) == 2
    assert fully_masked_rows([torch.full((4,), -INF)]) == 0


def test_patch_mends_only_bad_elements_of_its_mask():
    def run():
        values = torch.tensor([4.0, -1.0, 16.0, -4.0])
        return values.sqrt() * 1.0

    seen, _ = looked(run, index=1)
    mask = torch.tensor([False, True, False, False])
    with SecondRun(Patch({1: Spot(seen.op, (mask,), seen.read)})):
        mended = run()
    assert mended.isfinite().tolist() == [True, True, True, False]
    assert mended[[0, 2]].tolist() == [2.0, 4.0]


def test_patch_gives_numbers_that_differ():
    def run():
        return torch.ones(8).neg().sqrt()

    seen, _ = looked(run, index=2)
    with SecondRun(Patch({2: Spot(seen.op, seen.bad)})):
        assert run().unique().numel() == 8


def test_patch_that_meets_another_op_says_so():
    patch = Patch({0: Spot("aten.mul.Tensor", (None,))})
    with SecondRun(patch):
        torch.ones(2)
    assert patch.missed


def test_look_that_fails_does_not_end_the_run():
    def fails(*_):
        raise MemoryError("no room to look")

    def fails_later(*_):
        return fails

    with SecondRun(fails, fails_later):
        assert torch.ones(2).sum() == 2


def test_storage_names_keep_the_first():
    shared = torch.ones(3)
    second = shared[1:]
    seen, _ = looked(lambda: second + 1, names={"a": shared, "b": second})
    assert seen.inputs[0].name == "a"


def test_tensors_that_lie_one_behind_the_other_in_one_storage():
    """As the weights of a flat buffer do."""
    flat = torch.ones(9)
    first, second = flat[:6].view(2, 3), flat[6:]
    seen, _ = looked(lambda: second + first, names={"first": first, "second": second})
    assert [stats.name for stats in seen.inputs] == ["second", "first"]


def test_rows_that_an_op_makes_of_finite_operands_count_as_masked():
    low = torch.full((2, 4), torch.finfo(torch.float16).min, dtype=torch.float16)
    low[1, 3] = 0.0
    seen, _ = looked(lambda: low + low)
    assert (seen.fully_masked_rows, seen.wider) == (1, "finite")
    read, _ = looked(lambda: torch.full((2, 4), -INF) + torch.zeros(2, 4), index=2)
    assert read.fully_masked_rows == 2


def test_values_of_what_is_looked_at_are_counted_by_exponent():
    half = torch.tensor([300.0, 2.0], dtype=torch.float16)
    seen, _ = looked(lambda: half * half)
    assert [stats.exponents for stats in seen.inputs] == [((1, 1), (8, 1))] * 2
    assert seen.outputs[0].exponents == ((2, 1),)
