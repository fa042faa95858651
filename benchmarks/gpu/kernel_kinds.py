"""A small model for each kind of kernel, and the inputs that make that kernel fail.

Every model is an embedding, two layers of the kind, and a head. What the second layer reads is
multiplied by the batch's gain, 1 in a healthy step: 0 makes rows of zeros, and a large one leaves
the format inside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY, HEADS = 256, 2


@dataclass(frozen=True)
class Kind:
    """``layer``: makes a layer of a width, called with hidden states (batch, length, width) and the
    gain. ``faults``: by name, the gain of a failing batch. ``made``: what becomes of
    the model on its device. ``needs``: packages. ``cuda``: whether a CPU has no such kernel.
    """

    name: str
    layer: Callable[[int], nn.Module]
    faults: Mapping[str, float]
    dtype: torch.dtype = torch.bfloat16
    made: Callable[[nn.Module], nn.Module] = lambda model: model
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda trained: (
        torch.optim.SGD(trained, lr=1e-2, momentum=0.9)
    )
    around: Callable[[], Any] = nullcontext
    entropy: Callable[[], Callable[[Tensor, Tensor], Tensor]] = lambda: functional.cross_entropy
    needs: tuple[str, ...] = ()
    cuda: bool = False
    slow: bool = False
    """Whether a toy is to go without it."""


class Net(nn.Module):
    """Returns logits (batch, length, vocabulary) in float32."""

    def __init__(self, layer: Callable[[int], nn.Module], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, gain: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        hidden = hidden + self.layers[0](hidden, torch.ones_like(gain))
        hidden = hidden + self.layers[1](hidden, gain)
        return self.head(hidden).float()


class Scaled(nn.Module):
    """A layer that reads hidden states times the gain."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, gain: Tensor) -> Tensor:
        return self.inner(hidden * gain)


class Guarded(nn.Module):
    """A division that is kept from 0, in float16. A gain of 1e-5 squared is 0 there, and the guard
    holds; compiled code keeps it in float32, 1e-10, and 1e-5 / 1e-10 is beyond float16.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor, gain: Tensor) -> Tensor:
        level = ((1 + hidden.abs()) * gain).half()
        power = level * level
        ratio = level / torch.where(power == 0, 1.0, power)
        weight, bias = self.projection.weight.half(), self.projection.bias.half()
        return functional.linear(ratio, weight, bias) * gain.sqrt()


class Attention(nn.Module):
    """Causal attention whose queries and keys grow with the gain, and their products beyond
    float32, in which every kernel adds them up.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, gain: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        split = self.joint(hidden).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        query, key = query * gain, key * gain
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Called(nn.Module):
    """A function of hidden states, then a projection."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        from gpu import triton_kernel

        self.norm, self.projection = getattr(triton_kernel, name), nn.Linear(width, width)

    def forward(self, hidden: Tensor, gain: Tensor) -> Tensor:
        return self.projection(self.norm(hidden * gain))


def _liger_norm(width: int) -> nn.Module:
    from liger_kernel.transformers import LigerRMSNorm

    return Scaled(LigerRMSNorm(width, eps=0.0))


def _liger_mlp(width: int) -> nn.Module:
    from types import SimpleNamespace

    from liger_kernel.transformers import LigerSwiGLUMLP

    shape = {"hidden_size": width, "intermediate_size": 2 * width, "hidden_act": "silu"}
    return Scaled(LigerSwiGLUMLP(SimpleNamespace(**shape)))


def _liger_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss()


def _four_bit(width: int) -> nn.Module:
    import bitsandbytes as bnb

    whole = _large(nn.Linear(width, width, dtype=torch.float16, device="cpu"))
    form = {"compute_dtype": torch.float16, "quant_type": "nf4"}
    small = bnb.nn.Linear4bit(width, width, bias=False, **form)
    small.weight = bnb.nn.Params4bit(whole.weight.data, requires_grad=False)
    return Scaled(small)


def _adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["inner"]))


def _adamw_8bit(trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    import bitsandbytes as bnb

    return bnb.optim.AdamW8bit(trained, lr=1e-3)


def _in_float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=not torch.cuda.is_available())
    chosen = lambda _module, name: "inner" in name  # noqa: E731
    return convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def _linear(width: int) -> nn.Module:
    return Scaled(_large(nn.Linear(width, width)))


def _large(linear: nn.Linear) -> nn.Linear:
    """Return a layer whose products are some ten times what it reads."""
    nn.init.normal_(linear.weight)
    return linear


WIDE = {"product out of bfloat16": 2e36}
ZEROS = {"rows of zeros": 0.0}
KINDS = (
    Kind(
        "torch.compile",
        Guarded,
        {"root of -1": -1.0, "compiled only": 1e-5},
        dtype=torch.float32,
        made=torch.compile,
        slow=True,
    ),
    *(
        Kind(
            f"SDPA {name.removesuffix('_ATTENTION').lower()}",
            Attention,
            {"scores out of float32": 1e20},
            around=lambda name=name: sdpa_kernel(getattr(SDPBackend, name)),
            cuda=name in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"),
        )
        for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    ),
    *(
        Kind(name, lambda width, of=of: Called(of, width), ZEROS, needs=("triton",), cuda=True)
        for name, of in (
            ("Triton in a Function", "row_norm"),
            ("Triton as an op", "registered_row_norm"),
        )
    ),
    Kind("Liger RMSNorm", _liger_norm, ZEROS, needs=("triton", "liger_kernel"), cuda=True),
    Kind(
        "Liger SwiGLU, cross-entropy",
        _liger_mlp,
        {"product out of bfloat16": 1e20},
        entropy=_liger_entropy,
        needs=("triton", "liger_kernel"),
        cuda=True,
    ),
    Kind(
        "4-bit LoRA",
        _four_bit,
        {"product out of float16": 5e2},
        dtype=torch.float32,
        made=_adapted,
        needs=("bitsandbytes", "peft"),
    ),
    Kind("8-bit AdamW", _linear, WIDE, optimizer=_adamw_8bit, needs=("bitsandbytes",)),
    Kind("float8", _linear, WIDE, made=_in_float8, needs=("torchao",), cuda=True),
)
