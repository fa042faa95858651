"""One recorded, undone run of a step, for everybody who looks at operations. May synchronise the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.numerics.tensors import has_bad
from nanstop.records import Phase
from nanstop.replay.conditions import eager
from nanstop.replay.step import Batch, Step
from nanstop.tracing.op_patches import Patch, Spot
from nanstop.tracing.recorder import Recorder, Trace, Value


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run: its trace, the values that failed (name -> values) and what it raised."""

    trace: Trace
    failed: Mapping[str, tuple[Value, ...]]
    loss: tuple[Value, ...]
    error: Exception | None

    @property
    def reaches(self) -> tuple[str, ...]:
        """Return what the failure reached, an exception first."""
        return (("exception",) if self.error is not None else ()) + tuple(self.failed)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is run: a micro-batch of a step, or with ``update`` the update of its window; ``phase``: what it is called."""

    step: Step
    micro: int
    update: bool = False
    phase: Phase = "forward"


def known_tensors(scene: Scene) -> dict[str, Tensor]:
    """Return every tensor that has a name before the step runs: parameters, buffers, batch, optimizer state."""
    root = scene.step.view.root
    named: dict[str, Tensor] = dict(root.named_parameters())
    named |= {f"buffer {name}": buffer for name, buffer in root.named_buffers()}
    named |= dict(_batch_tensors(scene.step.batches[scene.micro]))
    return named | dict(_optimizer_state(scene.step))


def _batch_tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    pending: list[tuple[str, Any]] = [(str(key), value) for key, value in batch.items()][::-1]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Tensor):
            yield f"batch[{name}]", value
        elif isinstance(value, Mapping):
            pending += [(f"{name}.{key}", item) for key, item in value.items()][::-1]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}.{place}", item) for place, item in enumerate(value)][::-1]


def _optimizer_state(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Yield what an update reads besides the parameters: their gradients, where there are any yet, and the moments."""
    optimizer = step.view.optimizer
    if optimizer is None:
        return
    names = {id(p): name for name, p in step.view.root.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = names.get(id(parameter), "?")
            if parameter.grad is not None:
                yield f"state gradient of {owner}", parameter.grad
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"state {key} of {owner}", value


def record(step: Step, micro: int, *, update: bool = False, phase: Phase = "forward") -> Recording:
    """Run a micro-batch (or, with ``update``, the whole window and then its update) under the recorder, and undo it."""
    return recorded(Scene(step, micro, update, phase))


def recorded(scene: Scene, mended: Mapping[int, Spot] | None = None) -> Recording:
    recorders: list[Recorder] = []

    def make() -> Recorder:
        phase: Phase = "optimizer" if scene.update else scene.phase
        mend = Patch(mended) if mended else None
        named = known_tensors(scene)
        recorders.append(Recorder(scene.step.view.root, named, phase=phase, mend=mend))
        return recorders[0]

    def read(loss: Tensor | None, error: Exception | None) -> Recording:
        recorder = recorders[0]
        failed = {name: recorder.values(tensor) for name, tensor in failed_values(scene, loss)}
        reached = recorder.values(loss) if loss is not None else ()
        return Recording(recorder.finish(), failed, reached, error)

    return played(scene, make, read)


def played(
    scene: Scene,
    mode: Callable[[], TorchDispatchMode],
    read: Callable[[Tensor | None, Exception | None], Any],
) -> Any:
    """Run a scene under a mode made when it begins, and return what ``read`` says of its loss and error. Undone."""
    step = scene.step
    loss: Tensor | None = None
    error: Exception | None = None
    with step.isolated(with_update=scene.update), eager():
        if scene.update:
            for earlier in range(len(step.batches)):
                step.run(earlier)
        with mode():
            try:
                if scene.update:
                    step.update()
                else:
                    loss = step.run(scene.micro)
            except Exception as raised:  # what the run raises is what is being studied
                error = raised
        return read(loss, error)


def failed_values(scene: Scene, loss: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    if loss is not None and has_bad(loss):
        yield "loss", loss
    for name, parameter in scene.step.view.root.named_parameters():
        tensor = parameter.detach() if scene.update else parameter.grad
        if tensor is not None and has_bad(tensor):
            yield name, tensor
