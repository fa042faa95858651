"""What a script of this folder leaves:
a line of JSON a step and one at its end, written as the run goes on.

It looks at weights past torch's function modes and without a graph, so that a script with it has
the shape of one without.
"""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Record:
    """``record(step, *modules, loss=...)`` after every step, ``record.end(outputs...,
    loss=...)`` once.
    """

    def __init__(self, path: str = "left.jsonl") -> None:
        self._file = Path(path).open("w")  # noqa: SIM115  (open until the process ends, however it does)
        random.seed(0)  # else Python's own state is another one in every process

    def __call__(self, step: int, *modules: nn.Module, loss: Any = None) -> None:
        """Write the CRC32 of all parameters and buffers, whether they are finite, the loss, and
        the random state's CRC32.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            held = [t for m in modules for t in (*m.parameters(), *m.buffers())]
            self._write(step=step, loss=_number(loss), random=_random(), **_seen(held))

    def end(self, *outputs: Tensor, loss: Any = None) -> None:
        """Write the same of what the script ends with;
        ``loss`` is the measure of the trained model, less is better.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._write(end=True, loss=_number(loss), random=_random(), **_seen(list(outputs)))

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _seen(tensors: list[Tensor]) -> dict[str, Any]:
    crc, finite = 0, True
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        finite &= bool(flat.isfinite().all())
        crc = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), crc)
    return {"crc": crc, "finite": finite}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _random() -> int:
    drawn = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    return zlib.crc32(repr(random.getstate()).encode(), drawn)
