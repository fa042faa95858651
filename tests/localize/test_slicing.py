"""Slices of recorded traces: births, absorption, growth."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planted
from nanstop.localize import slicing
from nanstop.localize.dataflow import growth_chain
from nanstop.localize.provenance import descents
from nanstop.tracing.recorder import Recorder
from planted import INF, NAN, Net


def recorded(function, **names):
    """Trace of ``function(**names)`` with its tensors known by name, and the values of its
    result.
    """
    known = {
        (f"batch[{name}]" if name.startswith("batch") else name): tensor
        for name, tensor in names.items()
    }
    recorder = Recorder(nn.Module(), known)
    with recorder:
        result = function(*names.values())
    values = recorder.values(result)
    return recorder.finish(), values


def names_of(trace, indices):
    return [trace.ops[index].name.split(".")[1] for index in indices]


def births(function, **names):
    trace, values = recorded(function, **names)
    found = slicing.trace_back(trace, values)
    return trace, found


def test_nan_out_of_finite_values():
    trace, found = births(lambda w: (w * 2).sqrt().exp(), w=-torch.ones(3))
    assert (names_of(trace, found.nan), found.inf, found.external) == (["sqrt"], (), ())


def test_infinity_behind_a_nan():
    trace, found = births(lambda w: (w * 1e38 * 10) * 0, w=torch.ones(3))
    assert names_of(trace, found.nan) == ["mul"]
    assert names_of(trace, found.inf) == ["mul"]
    assert found.inf < found.nan


def test_value_that_was_bad_before():
    trace, found = births(lambda w: w.exp().sum(), w=torch.tensor([1.0, NAN]))
    ((reader, value),) = found.external
    assert (trace.ops[reader].name, value.storage.name) == ("aten.exp.default", "w")
    assert (found.nan, found.inf) == ((), ())


def test_result_that_no_op_wrote():
    trace, found = births(lambda w: w, w=torch.tensor([NAN]))
    assert found.external[0][0] == len(trace.ops)


def test_overwritten_value_is_forgotten():
    def body(w):
        y = w.log()
        y.fill_(1.0)
        return y.log()

    assert births(body, w=-torch.ones(2))[1].nan == ()


def test_partial_overwrite_keeps_older_writes():
    def body(w):
        y = w.log()
        y[0] = 1.0
        return y * 2

    trace, found = births(body, w=-torch.ones(3))
    assert names_of(trace, found.nan) == ["log"]


def test_lanes_are_kept_apart():
    def body(a, b):
        rooted = torch._foreach_sqrt([a, b])
        return torch._foreach_add(rooted, 1.0)[1]

    trace, found = births(body, a=-torch.ones(2), b=torch.ones(2))
    assert (found.nan, found.inf) == ((), ())
    trace, found = births(body, a=torch.ones(2), b=-torch.ones(2))
    assert names_of(trace, found.nan) == ["_foreach_sqrt"]


def test_unselected_branch_is_not_followed():
    trace, values = recorded(
        lambda w: torch.where(w > 0, w, (w - 1).log()), w=torch.tensor([1.0, 2.0])
    )
    assert not any(slicing.range_of(trace, value).is_bad for value in values)


def test_mutated_and_returned_outputs_are_both_written():
    model = nn.BatchNorm1d(3)
    recorder = Recorder(model, dict(model.named_buffers()))
    with recorder:
        result = torch.ops.aten._native_batch_norm_legit(
            torch.randn(4, 3), None, None, model.running_mean, model.running_var, True, 0.1, 1e-5
        )
    op = next(op for op in recorder.finish().ops if "batch_norm" in op.name)
    assert {value.storage.name for value in op.outputs} >= {"running_mean", "running_var", None}
    assert recorder.values(result[0])[0].storage.writers == [op.index]


def test_reaching_leaves_out_what_nothing_reads():
    def body(w):
        _ = w.sin()
        return w.cos()

    trace, values = recorded(body, w=torch.ones(2))
    assert names_of(trace, slicing.reaching(trace, values)) == ["cos"]


def absorbed(body, **names):
    trace, values = recorded(body, **names)
    return trace, slicing.absorbed_births(trace, slicing.reaching(trace, values))


def test_an_absorbed_infinity_is_placed_where_it_was_born():
    trace, (found,) = absorbed(lambda w: (w * 1e38 * 10).tanh(), w=torch.ones(3))
    assert names_of(trace, (found,)) == ["mul"]


def test_filled_infinities_are_no_absorption():
    _, found = absorbed(
        lambda w: F.softmax(w.masked_fill(torch.eye(3) > 0, -INF), -1), w=torch.ones(3, 3)
    )
    assert found == ()


@pytest.mark.parametrize(("factor", "expected"), [(8.0, ["mul"]), (1e4, [])])
def test_growth(factor, expected):
    trace, _ = recorded(
        lambda w, batch: ((batch * 100).relu() + w * 10).exp(),
        w=torch.ones(3),
        batch=torch.linspace(0.1, 1, 3),
    )
    last = len(trace.ops) - 1
    chain = growth_chain(trace, last, descents(trace), factor=factor)
    assert names_of(trace, chain) == expected


def test_growth_follows_activations_and_not_weights():
    """A large weight and a broadcast scale are no growth of the activation that meets them."""

    def body(w, batch):
        scaled = batch * torch.rsqrt(batch.square().mean(-1, keepdim=True) * 1e-8)
        return (scaled * (1 + w)).exp()

    trace, _ = recorded(body, w=torch.full((4,), 3e4), batch=torch.ones(2, 4))
    chain = growth_chain(trace, len(trace.ops) - 1, descents(trace))
    assert [trace.ops[i].name for i in chain] == ["aten.mul.Tensor", "aten.mul.Tensor"]


def test_growth_in_a_model_ends_at_the_failing_op():
    found = planted.located(Net(lambda x: x * 1e3 * 1e36))
    assert [event.scalars for event in found.growth] == [(1e3,)]
