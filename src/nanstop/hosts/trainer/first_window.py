"""The first window of a trainer that has been built.

Made as training makes it, used, and undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn

from nanstop.errors import NanstopError
from nanstop.hosts import compat, state_diff
from nanstop.hosts.trainer.callbacks import is_reporting
from nanstop.hosts.trainer.watch import TrainerWatch
from nanstop.replay.rng import rng_kept
from nanstop.replay.snapshot import BufferNotes
from nanstop.replay.step import Step
from nanstop.replay.undo import attributes_kept
from nanstop.session.first_window import first_window
from nanstop.session.watched_run import OpenSession

T = TypeVar("T")


def first_step(
    trainer: Any, job: Callable[[Step], T], *, train: Callable[[], Any] | None = None
) -> T:
    """Return what ``job`` returns of the first window that ``trainer`` would train on, before any
    update.

    The trainer's own ``train()`` (or ``train``, with the arguments of the user) runs up to the
    first update with the user's data, collator and objective; GRPO generates and is rewarded. It is
    then broken off: weights, gradients, buffers, random state, the trainer, its optimizer, schedule
    and accelerator are as they were. Callbacks of logging services are left out; other callbacks
    see the beginning of a training. What a data set or a reward function of the user's keeps for
    itself is out of reach. The step lives only inside ``job``.

    Raises NanstopError where the window cannot be run again, and what the first window raises.
    """
    if "train" in vars(trainer):
        raise NanstopError(
            "this trainer is being watched",
            hint="check or probe it before `nanstop.watch(trainer)`",
        )

    def begin(open_session: OpenSession) -> None:
        watch = TrainerWatch(trainer, open_session)
        watch.install()
        try:
            (train or trainer.train)()
        finally:
            watch.close()

    with put_back(trainer), quiet(trainer):
        return first_window(job, begin)


@contextmanager
def put_back(trainer: Any) -> Iterator[None]:
    """Put everything back on exit that the beginning of a training changes.

    Weights are not copied.
    """
    root: nn.Module = compat.unwrapped(trainer.model)
    hosts = [trainer, trainer.args, trainer.control, trainer.state, trainer.callback_handler]
    hosts += [trainer.accelerator, trainer.accelerator.gradient_state, *root.modules()]
    if trainer.optimizer is not None:
        hosts.append(trainer.optimizer)
    buffers = BufferNotes(root)
    with ExitStack() as undo:
        undo.enter_context(rng_kept())
        undo.enter_context(state_diff.kept(vars(host) for host in hosts if host is not None))
        undo.enter_context(buffers.kept())
        undo.enter_context(attributes_kept((p, "grad") for p in root.parameters()))
        yield


@contextmanager
def quiet(trainer: Any) -> Iterator[None]:
    """Inside, the trainer reports to no service, shows no progress, evaluates nothing first and
    pushes nothing.
    """
    kept = list(trainer.callback_handler.callbacks)
    trainer.callback_handler.callbacks[:] = [c for c in kept if not is_reporting(c)]
    trainer.args.eval_on_start = False
    trainer.init_hf_repo = lambda *_args, **_options: None
    log = logging.getLogger("transformers.trainer")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
