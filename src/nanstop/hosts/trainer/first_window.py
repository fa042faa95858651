"""The first window of a trainer that has been built.

Made as training makes it, used, and undone.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from nanstop.errors import NanstopError
from nanstop.hosts import compat
from nanstop.hosts.model.updates import accumulation_of, num_supervised
from nanstop.hosts.tape.taped_step import TapedStep
from nanstop.hosts.trainer.callbacks import is_reporting
from nanstop.hosts.trainer.watch import TrainerWatch
from nanstop.records import AccumulationFacts
from nanstop.replay import state_diff
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.rng import restore_rng, rng_kept
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


def probed_accumulation(trainer: Any, step: Any) -> AccumulationFacts:
    """Return how a trainer's own loss is divided, by asking it twice for one micro-batch of its
    first window, ``step``.

    Everything is undone. Reads two losses.

    A loss that is divided by the tokens of the window is half of itself when it is told of twice as
    many.
    """
    # Looks run a loss of the script's by what it called; here it is to be called itself.
    own = step.inner if isinstance(step, TapedStep) else step
    norms = accumulation_of(own.view.root)
    by_tokens = None
    labelled = [batch["labels"] for batch in own.batches if "labels" in batch]
    if labelled and compat.loss_is_scaled(trainer) is None:
        with own.isolated(), torch.no_grad():
            one, two = (_loss(trainer, own, count) for count in (8, 16))
        by_tokens = abs(two / one - 0.5) < 0.05 if math.isfinite(one) and one else None
    return AccumulationFacts(
        counts=tuple(num_supervised(labels) for labels in labelled),
        by_tokens=by_tokens,
        by_micros=compat.divides_loss(trainer),
        batch_norms=norms.batch_norms if norms else 0,
    )


def _loss(trainer: Any, step: Any, count: int) -> float:
    micro = step.window.micros[0]
    restore_rng(micro.rng)
    inputs = copy.copy(step.batches[0])
    with trainer.compute_loss_context_manager():
        items = torch.tensor(count, device=trainer.args.device)
        return float(trainer.compute_loss(micro.model, inputs, num_items_in_batch=items))
