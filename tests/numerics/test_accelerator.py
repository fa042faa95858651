"""What is asked of an accelerator is asked of any kind:
of one here that is neither CUDA nor known by name.
"""

import subprocess
import sys

import torch

from nanstop.numerics.tensors import has_float64, in_float64
from versions import needs

TOY = """
import types
import torch

class Toy(types.ModuleType):
    state = torch.zeros(2, dtype=torch.uint8)
    is_available = is_initialized = lambda self: True
    device_count = lambda self: 1
    current_device = lambda self: 0
    get_rng_state = lambda self, device="toy": self.state.clone()

    def set_rng_state(self, new, device="toy"):
        self.state = new.clone()

torch.utils.rename_privateuse1_backend("toy")
torch._register_device_module("toy", Toy("torch.toy"))
from nanstop.numerics import accelerator
from nanstop.numerics.tensors import has_float64
from nanstop.replay.rng import note_rng, restore_rng

before = note_rng()
torch.toy.state += 3
restore_rng(before)
print(accelerator.kind(), accelerator.in_use() is torch.toy, torch.toy.state.tolist())
print(has_float64(torch.device("toy")))
"""


@needs("torch", "2.7", "asks a device that registers itself whether it is there")
def test_random_state_and_formats_are_asked_of_any_accelerator():
    """In a process of its own, which keeps the accelerator to its end;
    it has no kernel, hence no float64 either.
    """
    done = subprocess.run([sys.executable, "-c", TOY], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["toy True [0, 0]", "False"]


def test_a_tensor_stays_where_its_device_has_float64():
    assert has_float64(torch.device("cpu"))
    wide = in_float64(torch.ones(2, dtype=torch.bfloat16))
    assert (wide.dtype, wide.device.type) == (torch.float64, "cpu")
