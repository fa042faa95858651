"""The benchmark's own recorder: where non-finite values are born in a script.
Shares nothing with what it judges.

``python births.py SCRIPT`` runs the script under it and prints one JSON line last: every birth (an
operation whose inputs are finite and whose output is not, or that makes NaN of infinities), the
first steps at which a loss, a gradient or a parameter was not finite, and how the script ended. A
module is known from ``nn.Module`` hooks in forward, and in backward from a note that each forward
call leaves in the metadata of its autograd nodes.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOTE = "births.module"
_MOST = 400
_SILENT = ("aten.empty", "aten.new_empty", "aten.full", "aten.scalar_tensor", "aten.lift_fresh")


class Clock:
    """Which step, micro-batch and phase it is, and which module runs."""

    def __init__(self) -> None:
        self.step = self.micro = 0
        self.backward = self.optimizer = False
        self.stack: list[str] = []
        self.names: dict[int, str] = {}
        self.first: dict[str, tuple[int, int]] = {}

    @property
    def phase(self) -> str:
        if self.optimizer:
            return "optimizer"
        return "backward" if self.backward else "forward"

    def bad(self, what: str) -> None:
        self.first.setdefault(what, (self.step, self.micro))

    def enter(self, module: nn.Module, _: Any) -> None:
        if not self.stack:
            self.names |= {id(one): name for name, one in module.named_modules()}
        self.stack.append(self.names.get(id(module), type(module).__name__))

    def leave(self, *_: Any) -> None:
        if self.stack:
            self.stack.pop()


class Notes(TorchFunctionMode):
    """Leaves the running module's name with each autograd node that a call makes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            return out
        here = self.clock.stack[-1] if self.clock.stack else ""
        waiting = [t.grad_fn for t in tree_leaves(out) if isinstance(t, Tensor) and t.grad_fn]
        while waiting:
            node = waiting.pop()
            if _NOTE in node.metadata:
                continue
            node.metadata[_NOTE] = here
            waiting += [following for following, _ in node.next_functions if following is not None]
        return out


class Births(TorchDispatchMode):
    """Notes each operation that makes something non-finite of finite inputs, or that raises."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.found: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        finite, no_nan = all(map(is_finite, given)), not any(map(has_nan, given))
        name = str(func)
        try:
            out = func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError):
            self._note(name, ())
            raise
        made = tree_leaves(out)
        born = (finite and not all(map(is_finite, made))) or (no_nan and any(map(has_nan, made)))
        if born and not name.startswith(_SILENT):
            self._note(name, out)
        return out

    def _note(self, name: str, out: Any) -> None:
        if len(self.found) == _MOST:
            return
        clock = self.clock
        module = clock.stack[-1] if clock.stack else ""
        if clock.backward and not clock.stack:
            node = torch._C._current_autograd_node()
            module = node.metadata.get(_NOTE, "") if node is not None else ""
        tensors = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        self.found.append(
            {
                "step": clock.step,
                "micro": clock.micro,
                "phase": clock.phase,
                "op": name,
                "module": module,
                "nan": any(map(has_nan, tensors)),
            }
        )


def _is_real(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.device.type != "meta"
        and value.numel() > 0
    )


def is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return value - value == 0.0
    return not _is_real(value) or bool(torch.isfinite(value.detach()).all())


def has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return _is_real(value) and bool(value.detach().isnan().any())


def install(clock: Clock) -> None:
    """Have ``clock`` follow the script: modules, backward calls and optimizer steps."""
    backward = Tensor.backward

    def watched(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if clock.backward:  # called once more by the mode that leaves notes
            backward(loss, *args, **kwargs)
            return
        if not is_finite(loss):
            clock.bad("loss")
        clock.backward = True
        try:
            backward(loss, *args, **kwargs)
        finally:
            clock.backward = False
        clock.micro += 1

    def before(optimizer: Any, *_: Any) -> None:
        clock.micro = max(0, clock.micro - 1)
        if not all(is_finite(p.grad) for group in optimizer.param_groups for p in group["params"]):
            clock.bad("grad")
        clock.optimizer = True

    def after(optimizer: Any, *_: Any) -> None:
        clock.optimizer = False
        if not all(is_finite(p) for group in optimizer.param_groups for p in group["params"]):
            clock.bad("param")
        clock.step, clock.micro = clock.step + 1, 0

    Tensor.backward = watched  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    nn.modules.module.register_module_forward_pre_hook(clock.enter)
    nn.modules.module.register_module_forward_hook(clock.leave, always_call=True)


def execute(script: Path) -> None:
    """Run ``script`` as ``__main__``. Errors: whatever it raises, but for an orderly exit."""
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise


@contextmanager
def ending(into: dict[str, Any]) -> Iterator[None]:
    """Note under ``ended`` how the code inside ended:
    "ok", or its error, which is printed and goes no further.
    """
    into["ended"] = "ok"
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        into["ended"] = f"{type(error).__name__}: {error}"


def run(script: Path) -> dict[str, Any]:
    """Run ``script`` under the recorder and return what happened, ready for JSON."""
    clock, found = Clock(), dict[str, Any]()
    install(clock)
    with Births(clock) as births, Notes(clock), ending(found):
        execute(script)
    return {"births": births.found, "first": clock.first, "steps": clock.step, **found}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]).resolve())))
