"""How far from float32 a cure may be, by how far what is healthy is."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanstop.prove.reference.agreement import SAME
from nanstop.prove.reference.tolerances import reference_of

FORMATS = [torch.float16, torch.bfloat16, torch.float32]
LOSSES = st.floats(0.0, 10.0)
GRADIENTS = st.floats(0.0, 100.0)


def tolerances(loss, cosine, gradient, dtype):
    exact = SimpleNamespace(
        dtype=torch.float32,
        coarsest_eps=lambda: torch.finfo(dtype).eps,
        num_taken=lambda: (0, 0),
        still_in=lambda: "",
        fails_in=lambda: "",
        leaves_half=False,
    )
    healthy = SimpleNamespace(gaps=lambda: ("the windows before", (loss, cosine, gradient)))
    return reference_of(SimpleNamespace(loss=1.0), "pass", exact, healthy)


@given(LOSSES, st.floats(0.5, 1.0), GRADIENTS, st.sampled_from(FORMATS))
def test_a_loss_is_as_near_as_healthy_ones_and_never_far(loss, cosine, gradient, dtype):
    found = tolerances(loss, cosine, gradient, dtype).loss_tolerance
    assert min(3 * loss, 0.2) <= found <= max(0.2, torch.finfo(dtype).eps)


@given(LOSSES, st.floats(-1.0, 0.49), GRADIENTS, st.sampled_from(FORMATS))
def test_a_loss_is_the_same_where_healthy_gradients_point_elsewhere(loss, cosine, gradient, dtype):
    """They are no measure: a clamp in bfloat16 was called as good as float32, with a loss that is
    not.
    """
    found = tolerances(loss, cosine, gradient, dtype).loss_tolerance
    assert found <= max(SAME, torch.finfo(dtype).eps)
