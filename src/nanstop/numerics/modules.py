"""What a model's modules tell by structure alone: its blocks, packed layers, tied parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from nanstop.numerics.tensors import dense_parts

_SHARDING = ("torch.distributed.", "deepspeed.", "fairscale.", "megatron.")
"""Packages whose modules gather weights or pass activations on while they run. Told by names:
Megatron is run from a checkout, no installed file says whose class it is, and a model that is
taken for a local one may hang.
"""
_PACKED = {"Linear4bit": 4, "Linear8bitLt": 8}
"""Layers of bitsandbytes, and the bits in which they hold a weight."""


def repeated_blocks(root: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's repeated blocks, in the order in which it holds them.

    They are the members with parameters and parts of their own of each outermost ``ModuleList``,
    or of a ``Sequential`` of one class; what is inside a block (experts) is none.
    """
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in root.named_modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members = dict(module.named_children())
        blocks = {key: one for key, one in members.items() if _is_composed(one)}
        several = isinstance(module, nn.ModuleList) or len(members) > 1
        alike = isinstance(module, nn.ModuleList) or len({type(m) for m in members.values()}) == 1
        if blocks and several and alike:
            found |= {f"{name}.{key}" if name else key: one for key, one in blocks.items()}
            inside |= {id(part) for one in blocks.values() for part in one.modules()}
    return tuple(found)


def outermost(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are no part of another one of them."""
    inside = {id(part) for root in roots for part in root.modules() if part is not root}
    return [root for root in roots if id(root) not in inside]


def _is_composed(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def lies_on_several(root: nn.Module) -> bool:
    """Return whether weights of a model, without what it is wrapped in, lie on several processes,
    or it is run by several.
    """
    kinds = {kind for module in root.modules() for kind in type(module).__mro__}
    return any(kind.__module__.startswith(_SHARDING) for kind in kinds)


def packed_bits(module: nn.Module) -> int | None:
    """Return in how many bits a layer of bitsandbytes holds its weight; None for any other, PEFT's
    wrappers of the same names among them.
    """
    library = sys.modules.get("bitsandbytes.nn")  # there once a layer of it is
    kinds = ((getattr(library, name, None), bits) for name, bits in _PACKED.items())
    return next((bits for kind, bits in kinds if kind and isinstance(module, kind)), None)


def quantized_layers(root: nn.Module) -> tuple[str, ...]:
    """Return names of modules whose own weight is packed (bitsandbytes 4-bit, 8-bit)."""
    return tuple(name for name, module in root.named_modules() if packed_bits(module))


def named_with_tied(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Give each parameter under each of its names, as often as modules hold it.

    As torch's own class does it: a module whose class has a ``named_parameters`` of its own may
    take no ``remove_duplicate`` (losses of torchrl, which hide what targets hold).
    """
    return nn.Module.named_parameters(root, remove_duplicate=False)


def tied_groups(root: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return groups of parameter names that share one storage."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, p in named_with_tied(root):
        part = next(iter(dense_parts(p)), p)  # of a sharded one what is here
        if p.device.type == "meta" or not part.numel():
            place: tuple[Any, ...] = (id(p),)
        else:
            memory = part.untyped_storage().data_ptr()
            place = (p.device, memory, part.storage_offset(), p.shape)
        groups.setdefault(place, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
