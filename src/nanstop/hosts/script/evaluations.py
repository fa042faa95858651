"""Evaluations of an unchanged loop: model calls without gradients, between its steps.

Nothing is read for them. A number that the script itself reads and finds NaN or Inf is what asks;
only then are the latest calls made again, undone, and looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nanstop.frozen import frozen
from nanstop.hosts.tape.tensors import Autocast, autocast_state, in_autocast
from nanstop.numerics.nested import mapped, named_inputs
from nanstop.numerics.tensors import bytes_of, tensors, version
from nanstop.replay.rng import RngState, note_rng
from nanstop.replay.step import Batch
from nanstop.tracing.places import Line

_MAX_HELD = 8
_MAX_HELD_BYTES = 2**24
"""Calls that are kept, by what they were given, so as to be made again: the last one in any case.
"""


@frozen
class _Noted:
    module: ref[nn.Module]
    """The script may throw away what it has evaluated."""
    args: Any
    kwargs: Any
    trains: bool
    versions: tuple[int, ...]
    num_bytes: int
    autocast: Autocast


class EvaluationMicro:
    """See ``hosts.loop.step.Micro``: a model call without gradients.

    ``loss``: how large what the model returned is.
    """

    calls_script = False
    reduced = False

    def __init__(self, noted: _Noted, module: nn.Module, number: float) -> None:
        self.loss: Tensor | None = torch.tensor(number)
        self.rng: RngState = note_rng()
        self.module = module
        self._noted = noted
        with torch.inference_mode(mode=False):
            self._args, self._kwargs = mapped(noted.args, _usual), mapped(noted.kwargs, _usual)

    @property
    def batch(self) -> Batch:
        return dict(named_inputs(self.module, self._args, self._kwargs, Tensor))

    def obstacle(self) -> str:
        given = tensors((self._noted.args, self._noted.kwargs))
        moved = tuple(map(version, given)) != self._noted.versions
        return "an input was changed in place after the evaluation" if moved else ""

    def rerun(self, batch: Batch | None) -> Tensor:
        noted, given = self._noted, batch or {}
        replaced = {id(old): given[name] for name, old in self.batch.items() if name in given}

        def entry(value: Any) -> Any:
            return replaced.get(id(value), value)

        args, kwargs = mapped(self._args, entry), mapped(self._kwargs, entry)
        self.module.train(noted.trains)  # put back by whoever runs it
        with torch.no_grad(), in_autocast(noted.autocast):
            return _size(tensors(self.module(*args, **kwargs)))

    def leaves(self) -> Iterable[Tensor]:
        return ()

    def cuts(self) -> list[Line]:
        return []


class Evaluations:
    """Keeps the latest model calls without gradients until a step begins."""

    def __init__(self) -> None:
        self._noted: deque[_Noted] = deque(maxlen=_MAX_HELD)

    def note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call that the loop made. No device work."""
        given = tensors((args, kwargs))
        size = bytes_of(*given)
        versions = tuple(map(version, given))
        device = next((tensor.device.type for tensor in given), "cpu")
        noted = _Noted(
            ref(module), args, kwargs, module.training, versions, size, autocast_state(device)
        )
        self._noted.append(noted)
        while len(self._noted) > 1 and sum(one.num_bytes for one in self._noted) > _MAX_HELD_BYTES:
            self._noted.popleft()

    def clear(self) -> None:
        self._noted.clear()

    @property
    def modules(self) -> list[nn.Module]:
        """The models that were called, the latest first."""
        return list({id(module): module for _, module in self._alive()}.values())

    def take(self, number: float) -> list[EvaluationMicro]:
        """Return the noted calls, the latest first, and forget them."""
        found = [EvaluationMicro(noted, module, number) for noted, module in self._alive()]
        self.clear()
        return found

    def _alive(self) -> Iterator[tuple[_Noted, nn.Module]]:
        for noted in reversed(self._noted):
            module = noted.module()
            if module is not None:
                yield noted, module


def _usual(value: Any) -> Any:
    """Return a copy of a tensor that was made for inference, of which no graph can be made; of
    anything else itself.
    """
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _size(found: Iterable[Tensor]) -> Tensor:
    """Return the mean magnitude of all numbers, so that no two results look alike. NaN where one
    is, Inf where one is; -Inf is what a mask leaves.
    """
    sizes = [_mean_magnitude(t.float()) for t in found if _is_floating(t)]
    return torch.stack(sizes).mean() if sizes else torch.zeros(())


def _mean_magnitude(values: Tensor) -> Tensor:
    """Return it of values whose sum may leave the format."""
    magnitudes = values.masked_fill(values == -torch.inf, 0.0).abs()
    most = magnitudes.amax()
    least = torch.finfo(magnitudes.dtype).tiny
    return torch.where(most.isfinite(), (magnitudes / most.clamp(min=least)).mean() * most, most)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0
