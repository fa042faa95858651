"""What a tensor is to torch's graphs before, while and after it is held in another format."""

import gc

import pytest
import torch
from torch import nn

from nanstop.replay.held import swapped


def gathering(parameter):
    """The node that gathers a leaf's gradients, which every graph of it ends in."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_graphs_that_the_script_holds_end_where_new_ones_do(dtype):
    net = nn.Linear(3, 1)
    held = net(torch.ones(2, 3)).sum()
    node, version = gathering(net.weight), net.weight._version
    with swapped(net.parameters(), dtype):
        assert net.weight.dtype == dtype
        assert net(torch.ones(2, 3, dtype=dtype)).dtype == dtype
    assert gathering(net.weight) is node
    assert (net.weight.dtype, net.weight._version) == (torch.float32, version)
    (held + net(torch.ones(2, 3)).sum()).backward()
    assert net.weight.grad.tolist() == [[4.0, 4.0, 4.0]]


def test_hooks_on_a_gradient_are_called_in_either_format():
    net, seen = nn.Linear(3, 1), []

    def run(dtype):
        net(torch.ones(2, 3, dtype=dtype)).sum().backward()

    before = net.weight.register_hook(lambda grad: seen.append(("before", grad.dtype)))
    with swapped(net.parameters(), torch.float64):
        net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.dtype)))
        run(torch.float64)
        before.remove()
    run(torch.float32)
    assert seen == [
        ("before", torch.float64),
        ("after", torch.float64),
        ("after", torch.float32),
    ]


def test_what_is_frozen_meanwhile_stays_so():
    net = nn.Linear(3, 1)
    with swapped(net.parameters(), torch.float64):
        net.bias.requires_grad_(False)
        net.weight.data.fill_(0.5)
    assert not net.bias.requires_grad
    assert net.weight.requires_grad
    assert net.weight.tolist() == [[0.5, 0.5, 0.5]]


def test_a_tensor_that_an_open_autocast_has_cast_is_held_all_the_same():
    net = nn.Linear(3, 1)
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.ones(2, 3))
        with swapped(net.parameters(), torch.float64):
            assert net.weight.dtype == torch.float64
        assert net.weight.dtype == torch.float32
    net(torch.ones(2, 3)).sum().backward()
    assert net.weight.grad.dtype == torch.float32


def test_the_copies_are_gone_with_the_last_who_needs_them():
    net, shape = nn.Linear(77, 101).half(), (101, 77)

    def copies():
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        return [one for one in tensors if one.shape == shape and one.dtype is torch.float32]

    gc.collect()
    gc.disable()  # nobody looks for circles soon, least of all when a device's memory is short
    try:
        with swapped(net.parameters(), torch.float32):
            net(torch.ones(2, 77)).sum().backward()
            assert copies()
        net.weight.grad = None
        assert not copies()
    finally:
        gc.enable()
