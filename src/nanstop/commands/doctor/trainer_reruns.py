"""A trainer that trains again and again, each time from where it stood.

Nothing is saved, shown or sent.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nanstop.commands.doctor.planted import PoisonedLoss, Reads, descends, target_among
from nanstop.hosts import compat
from nanstop.hosts.patch_table import Table
from nanstop.hosts.patching import Patches
from nanstop.hosts.trainer.callbacks import TrainerCallback, is_reporting, is_users
from nanstop.hosts.trainer.view import HfView
from nanstop.hosts.trainer.watch import TrainerWatch, watch_trainer
from nanstop.process.inject.save_nothing import save_nothing
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.snapshot import Snapshot, Trainable
from nanstop.replay.rng import note_rng, restore_rng

_EVENTS = (
    "on_epoch_begin",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_log",
    "on_epoch_end",
)
"""What happens in a training of a few steps without evaluation and checkpoints."""

Plant = Callable[[], float | None]


class TrainerReruns:
    """A trainer and the way back. ``parameters``: those that train; ``before``: copies of them.

    ``callbacks``: the user's own by name.
    ``opens_watch``: how the script's own ``nanstop.watch`` opens its session.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.name = type(trainer).__name__
        self.notes = _notes(trainer)
        self.opens_watch = _end_watch(trainer)
        self.callbacks = self._named_callbacks()
        self.view = HfView(trainer)
        named = self.view.root.named_parameters()
        self.parameters: dict[str, Tensor] = {n: p for n, p in named if p.requires_grad}
        self.loss = LossPlace()
        self.target: Tensor | None = None
        self._writers = Table()
        trainable = Trainable(self.parameters, self.view.optimizer, self.view.scaler)
        self._snapshot = Snapshot(trainable)
        self.before = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}

    @property
    def step(self) -> int:
        return self.trainer.state.global_step

    @property
    def has_scaler(self) -> bool:
        return compat.run_scaler(self.trainer) is not None

    @property
    def optimizers(self) -> list[Optimizer]:
        found = map(compat.unwrapped_optimizer, compat.optimizers_of(self.trainer))
        return [one for one in found if one is not None]

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Put everything back that a training inside changes."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        kept = [(one, dict(vars(one)), type(one)) for one in (trainer, accelerator)]
        handler = dict(vars(trainer.callback_handler))
        rng, buffers = note_rng(), BufferNotes(self.view.root)
        notes = buffers.note()
        try:
            yield
        finally:
            self._writers.undo()
            for one, attributes, kind in kept:
                vars(one).clear()
                vars(one).update(attributes)
                one.__class__ = kind
            vars(trainer.callback_handler).clear()
            vars(trainer.callback_handler).update(handler)
            self._snapshot.restore()
            buffers.restore(notes)
            for parameter in self.parameters.values():
                parameter.grad = None
            restore_rng(rng)

    def prepare(
        self, *, num_steps: int, removed: frozenset[str], filtered: bool, watched: bool
    ) -> None:
        """Have the next training be short and quiet, and without the guards that are taken away."""
        trainer = self.trainer
        args = trainer.args = copy.copy(trainer.args)
        args.max_steps, args.logging_steps, args.logging_first_step = num_steps, 1, False
        args.logging_strategy = type(args.logging_strategy)("steps")
        args.disable_tqdm, args.eval_on_start, args.load_best_model_at_end = True, False, False
        args.logging_nan_inf_filter = args.logging_nan_inf_filter and filtered
        memo = {id(one): one for one in vars(trainer).values()}
        memo |= {id(trainer): trainer, id(self.view.root): self.view.root}
        kept = [one for name, one in self._named() if name not in removed]
        trainer.callback_handler.callbacks = [*(_fresh(one, memo) for one in kept), _Quiet()]
        save_nothing(self._writers, trainer)
        if self.opens_watch is not None and watched:
            watch_trainer(trainer, self.opens_watch)

    @contextmanager
    def planted(self, plant: Plant, poisoned: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """Have ``plant`` say what each loss is to be, and ``poisoned`` what the gradient of one
        parameter is.
        """
        with ExitStack() as scope:
            scope.enter_context(self.loss.planted(self.trainer, self.view.root, plant))
            if self.target is not None:
                scope.callback(self.target.register_hook(poisoned).remove)
            yield

    def train(self, reads: Reads) -> BaseException | None:
        """Train; return the exception that ended it, None where none did."""
        try:
            with reads:
                self.trainer.train()
        except (Exception, SystemExit) as error:
            return error
        return None

    def note_gradients(self) -> None:
        """Choose, once, the parameter whose gradient is to be bad: the first that has one."""
        if self.target is None:
            self.target = target_among(self.parameters.values())

    def bad_logs(self) -> tuple[str, ...]:
        """Return the logged numbers that are not finite, as ``STEP:NAME``."""
        return tuple(
            f"{entry.get('step')}:{name}"
            for entry in self.trainer.state.log_history
            for name, value in entry.items()
            if isinstance(value, float) and not math.isfinite(value)
        )

    def _named(self) -> list[tuple[str, Any]]:
        """Return every callback that stays, the user's own under their names."""
        found: list[tuple[str, Any]] = []
        for one in self.trainer.callback_handler.callbacks:
            if is_reporting(one):
                continue
            name = f"callback {type(one).__name__}" if _acts(one) else ""
            if name and any(name == known for known, _ in found):
                name = f"{name} {sum(known.startswith(name) for known, _ in found) + 1}"
            found.append((name, one))
        return found

    def _named_callbacks(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._named() if name)


class LossPlace:
    """Where the loss of a trainer is first whole.

    The model's own output, or what a ``compute_loss`` returns.

    Found in the first training, by following the loss that is backpropagated: of all candidates the
    innermost that it descends from, so that whatever looks at the loss later sees the planted one.
    """

    def __init__(self) -> None:
        self.level: str | None = None
        self._seen: dict[str, Tensor] = {}

    @contextmanager
    def planted(self, trainer: Any, root: Any, plant: Plant) -> Iterator[None]:
        """Inside, have ``plant`` act, and the loss, the model's call and the backward looked at."""
        table, patches = Table(), Patches()
        for kind in type(trainer).__mro__:
            if "compute_loss" in vars(kind):
                name = f"{kind.__module__}.{kind.__qualname__}"
                table.replace(kind, "compute_loss", partial(self._computed, name, plant))
        hook = root.register_forward_hook(partial(self._called, plant), prepend=True)
        backward = trainer.accelerator.backward

        def note_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._locate(loss)
            return backward(loss, *args, **kwargs)

        patches.set(trainer.accelerator, "backward", note_backward)
        try:
            yield
        finally:
            patches.undo()
            hook.remove()
            table.undo()

    def _locate(self, final: Tensor) -> None:
        if self.level is None:
            levels = (name for name, loss in self._seen.items() if descends(final, loss))
            self.level = next(levels, None)
        self._seen.clear()

    def _computed(self, name: str, plant: Plant, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        planted = self._at(name, loss, plant)
        if planted is None:
            return result
        return (planted, *result[1:]) if isinstance(result, tuple) else planted

    def _called(self, plant: Plant, _module: Any, _args: Any, output: Any) -> Any:
        loss = output.get("loss") if hasattr(output, "get") else None
        planted = self._at("the model", loss, plant)
        if planted is not None:
            output["loss"] = planted
        return output

    def _at(self, name: str, loss: Any, plant: Plant) -> Tensor | None:
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            return None
        if self.level is None:
            self._seen[name] = loss
        value = plant() if self.level == name else None
        return None if value is None else PoisonedLoss.apply(loss, value)  # type: ignore[return-value]


class _Quiet(TrainerCallback):
    """The last callback: nothing is saved and nothing evaluated."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        control.should_save = control.should_evaluate = False

    on_epoch_end = on_step_end
    on_train_begin = on_step_end


def _end_watch(trainer: Any) -> Any:
    """Take the script's own watch off a trainer.

    Return how it opens its session, None where there is none.
    """
    watch = getattr(vars(trainer).get("train"), "__self__", None)
    if not isinstance(watch, TrainerWatch):
        return None
    watch.close()
    return watch._open_session


def _notes(trainer: Any) -> list[str]:
    """Return what of the user's stack such short trainings cannot show."""
    notes: list[str] = []
    idle = [c for c in trainer.callback_handler.callbacks if is_users(c) and not _acts(c)]
    if idle:
        names = ", ".join(type(callback).__name__ for callback in idle)
        notes.append(f"not tried, for it acts at evaluation, saving or the ends only: {names}")
    every = trainer.args.logging_steps
    if trainer.args.logging_strategy == "steps" and every != 1:
        notes.append(
            f"every step is logged here; what waits for a log waits {every} steps in yours"
        )
    return notes


def _acts(callback: Any) -> bool:
    """Return whether a callback that is not transformers' own does something in such a training."""
    if not is_users(callback):
        return False
    kind = type(callback)
    return any(
        getattr(kind, event, None) is not getattr(TrainerCallback, event, None) for event in _EVENTS
    )


def _fresh(callback: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a callback that shares what belongs to the trainer.

    The callback itself if it has none.
    """
    try:
        return copy.deepcopy(callback, dict(memo))
    except Exception:  # an open file, say
        return callback
