"""From a failing step to the operation that broke it.

A recorded run finds where bad values were born on the way to the failing loss, gradient or weight; a second run looks
closely at those few ops; and short runs in which one birth is put right confirm that it is the cause. All are undone;
all may synchronise the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.localize import slicing
from nanstop.localize.origin import Story
from nanstop.localize.positions import Grid
from nanstop.numerics.tensors import has_bad
from nanstop.records import Localization, Phase
from nanstop.replay.eager import eager
from nanstop.replay.step import Batch, Step
from nanstop.tracing.op_details import CloseUp, Observer, storage_names
from nanstop.tracing.op_patches import Patch, Revisit, Spot
from nanstop.tracing.recorder import Recorder, Trace, Value

_MAX_CLOSEUPS = 24
_MAX_DECOYS = 2
"""How many births that explain nothing are passed over before the earliest is taken."""


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
    return _recorded(Scene(step, micro, update, phase))


def _recorded(scene: Scene, mended: Mapping[int, Spot] | None = None) -> Recording:
    recorders: list[Recorder] = []

    def make() -> Recorder:
        phase: Phase = "optimizer" if scene.update else scene.phase
        mend = Patch(mended) if mended else None
        named = known_tensors(scene)
        recorders.append(Recorder(scene.step.view.root, named, phase=phase, mend=mend))
        return recorders[0]

    def read(loss: Tensor | None, error: Exception | None) -> Recording:
        recorder = recorders[0]
        failed = {name: recorder.values(tensor) for name, tensor in _failed(scene, loss)}
        reached = recorder.values(loss) if loss is not None else ()
        return Recording(recorder.finish(), failed, reached, error)

    return _played(scene, make, read)


def _played(
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


def _failed(scene: Scene, loss: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    if loss is not None and has_bad(loss):
        yield "loss", loss
    for name, parameter in scene.step.view.root.named_parameters():
        tensor = parameter.detach() if scene.update else parameter.grad
        if tensor is not None and has_bad(tensor):
            yield name, tensor


def localize(
    step: Step,
    micro: int,
    *,
    update: bool = False,
    phase: Phase = "forward",
    clock: Callable[[], float] = time.perf_counter,
) -> Localization | None:
    """Return where the failure of a micro-batch was born, or None if it ran clean.

    ``update``: localize the optimizer update of the window instead. ``phase``: what the run is called when it is no
    training step ("evaluate", "generate"). An overflow that turned finite again is reported even where nothing failed.
    """
    began = clock()
    scene = Scene(step, micro, update, phase)
    first = _recorded(scene)
    story = _told(scene, first, {})
    if story is not None and not story.stable:
        # Caches that fill at first use (of a nested tensor's sizes, say) make the first run of a process another path.
        first = _recorded(scene)
        story = _told(scene, first, {})
    if story is None:
        return None
    story = _confirmed(scene, story)
    found = story.tell()
    if found is None:
        return None
    return replace(found, num_ops=len(first.trace.ops), seconds=clock() - began)


def _told(scene: Scene, recording: Recording, mended: Mapping[int, Spot]) -> Story | None:
    """Return what a recording and a close-up of its births say; None if nothing failed and nothing was absorbed."""
    births = slicing.trace_back(recording.trace, _sinks(recording))
    births = slicing.with_dropped(recording.trace, births)
    live = slicing.reaching(recording.trace, _ends(recording))
    absorbed = slicing.absorptions(recording.trace, live)
    if not recording.reaches and not absorbed:
        return None
    closeups = _looked(scene, _wanted(recording, births, absorbed), mended)
    return Story(
        recording.trace,
        births,
        closeups,
        recording.reaches,
        absorbed,
        error=type(recording.error).__name__ if recording.error is not None else "",
        grid=_grid(scene),
    )


def _sinks(recording: Recording) -> list[Value]:
    """Return the bad values to trace: operands of an op that raised, else a failing loss, else failing gradients."""
    if recording.error is not None:
        return [
            value
            for value in _raised_operands(recording.trace)
            if slicing.range_of(recording.trace, value).is_bad
        ]
    if "loss" in recording.failed:
        return list(recording.failed["loss"])
    return [value for values in recording.failed.values() for value in values]


def _ends(recording: Recording) -> list[Value]:
    values = [value for values in recording.failed.values() for value in values]
    if recording.error is not None:
        values += _raised_operands(recording.trace)
    return [*values, *recording.loss]


def _raised_operands(trace: Trace) -> list[Value]:
    """Return what the op that raised had read; where the program itself raised, the last bad values it looked at."""
    backwards = list(reversed(trace.ops))
    raised = next((op for op in backwards if op.raised), None)
    if raised is not None:
        return list(raised.inputs)
    bad = ([v for v in op.inputs if slicing.range_of(trace, v).is_bad] for op in backwards)
    return next(filter(None, bad), [])


def _wanted(
    recording: Recording, births: slicing.Births, absorbed: Iterable[slicing.Absorption]
) -> set[int]:
    num_ops = len(recording.trace.ops)
    chosen = {*births.inf[:_MAX_CLOSEUPS], *births.nan[:_MAX_CLOSEUPS]}
    chosen |= {index for index, _ in births.external[:2] if index < num_ops}
    chosen |= {op.index for op in recording.trace.ops if op.raised}
    for absorption in absorbed:
        if len(chosen) < 3 * _MAX_CLOSEUPS:
            chosen.add(absorption.birth)
    return chosen


def _looked(scene: Scene, wanted: Iterable[int], mended: Mapping[int, Spot]) -> dict[int, CloseUp]:
    observer = Observer(wanted, storage_names(known_tensors(scene)))
    looks = (Patch(mended), observer) if mended else (observer,)
    return _played(scene, lambda: Revisit(*looks), lambda *_: observer.seen)


def _grid(scene: Scene) -> Grid | None:
    ids = scene.step.view.token_ids(scene.step.batches[scene.micro])
    if ids is None or ids.dim() != 2:
        return None
    return Grid((int(ids.shape[0]), int(ids.shape[1])), scene.step.view.root)


def _confirmed(scene: Scene, story: Story) -> Story:
    """Return the story whose cause stands the test: with it put right the failure is gone, or without it remains.

    A padded row may be NaN while the failure is born in another row of the same tensor: the earliest birth is then a
    decoy. It is put right for good, and the run recorded again.
    """
    first = story
    mended: dict[int, Spot] = {}
    for _ in range(_MAX_DECOYS):
        suspect = story.suspect()
        if suspect is None or not first.reaches:
            return story
        tried = mended | suspect
        if _passes(scene, first.reaches, tried):
            return story
        rest = _told(scene, _recorded(scene, tried), tried)
        other = rest.suspect() if rest is not None else None
        if rest is None or other is None or not _passes(scene, first.reaches, mended | other):
            return story
        mended, story = tried, rest.with_reaches(first.reaches)
    return story


def _passes(scene: Scene, reaches: tuple[str, ...], mended: Mapping[int, Spot]) -> bool:
    """Return whether what failed first is finite with some births put right."""
    patch = Patch(mended)

    def read(loss: Tensor | None, error: Exception | None) -> bool:
        if patch.missed or error is not None:
            return False
        return reaches[0] not in dict(_failed(scene, loss))

    return _played(scene, lambda: Revisit(patch), read)
