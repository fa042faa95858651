"""A window of a raw training loop that can be run again.

The ``Step`` of loops without a trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.decide.agreement import on_every_rank
from nanstop.errors import NanstopError
from nanstop.hosts.loop.given_objects import given_in_objects, put_there, tables_given
from nanstop.hosts.loop.micro import Micro, called_beside
from nanstop.hosts.loop.rates import at_rates, learning_rates, set_learning_rates
from nanstop.hosts.replicas import ONE_COPY, Replicas, is_here
from nanstop.hosts.run_again import run_again
from nanstop.hosts.sharded.redirected import redirected
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.window.remedies import WindowRemedies, under
from nanstop.numerics.parked import Away, is_tight
from nanstop.numerics.trained import held_by
from nanstop.records import Atom, BatchRows, RunFacts, SourceLine, StepId
from nanstop.replay.collectives import Collectives
from nanstop.replay.copies.buffers import Buffers
from nanstop.replay.copies.snapshot import Trainable, ready_scaler
from nanstop.replay.rng import note_rng, restore_rng
from nanstop.replay.state_diff import kept
from nanstop.replay.step import Batch, Measure, ModelView, parameters_of, trainable_of, undone
from nanstop.replay.untouched import versions_kept
from nanstop.tracing.places import Line
from nanstop.tracing.source.hook_lines import hook_lines


@dataclass(slots=True)
class LoopStep:
    """See ``replay.step.Step``.

    ``isolated`` raises ``NanstopError`` where the window cannot be run again.

    ``start``: the buffers as they were when the window began. ``apply``: the update as the loop
    makes it, under a view. ``rates``: the learning rates of this window, one for each group;
    ``usual``: those that windows of the run have had; ``rates_of``: of all optimizers that were
    judged in it. ``made_by``: those that have made its update, or will, given one. ``past`` and
    ``rewritten_at``: see ``HostStep``.
    ``without_graph``: modules that the script has called under no_grad, how often, and the first
    line that did. ``put_in_eval``: those that it put in evaluation mode, the last line that did,
    whether it has called them under no_grad since, and how often that came to be so.
    """

    id: StepId
    view: ModelView
    facts: RunFacts
    micros: Sequence[Micro]
    buffers: Buffers
    start: Any
    apply: Callable[[ModelView], None]
    rates: tuple[Any, ...] = ()
    usual: Collection[tuple[Any, ...]] = ()
    rates_of: Mapping[Optimizer, tuple[Any, ...]] = field(default_factory=dict)
    made_by: Callable[[Optimizer], Sequence[Optimizer]] = lambda optimizer: (optimizer,)
    past: str = ""
    rewritten_at: Callable[[], tuple[SourceLine, ...] | None] = lambda: None
    without_graph: Mapping[nn.Module, tuple[int, Line]] = field(default_factory=dict)
    put_in_eval: Mapping[nn.Module, tuple[Line, bool, int]] = field(default_factory=dict)
    remedies: WindowRemedies = field(default_factory=WindowRemedies)
    replicas: Replicas = ONE_COPY
    collectives: Collectives = field(default_factory=Collectives)
    _made: dict[int, frozenset[str]] = field(default_factory=dict)
    """By micro-batch what its first run again has put into objects that the model is given."""

    def learned(self, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)

    @property
    def batches(self) -> tuple[Batch, ...]:
        return tuple([m.batch for m in self.micros])

    @property
    def losses(self) -> tuple[Tensor | None, ...]:
        return tuple([m.loss for m in self.micros])

    @property
    def calls_script(self) -> bool:
        return any(m.calls_script for m in self.micros)

    @property
    def is_local(self) -> bool:
        return is_here(self.view.root, self.replicas)

    def has_spoilt_buffers(self) -> bool:
        """Return whether it has left in a buffer what is not finite and was before."""
        return self.buffers.spoilt(self.start)

    @property
    def condition(self) -> str:
        """Under what of the script's own alone the window fails when it is run again, or ""."""
        hooked = [pair for m in self.micros for pair in getattr(called_beside(m), "hooks", ())]
        lines = [line for pair in hooked for hook in pair for line in hook_lines(hook, -1)]
        if not lines:
            return ""
        return f"only under the script's own hooks on what autograd saves ({lines[0].short})"

    @contextmanager
    def made_anew(self) -> Iterator[None]:
        """Have runs inside make again what the script made of its models before it called one for
        its loss, instead of taking it as it is.
        """
        taped: Any = [micro for micro in self.micros if hasattr(micro, "is_anew")]
        for micro in taped:
            micro.is_anew = True
        try:
            yield
        finally:
            for micro in taped:
                micro.is_anew = False

    def cuts(self) -> list[Line]:
        """Return the lines at which the first micro-batch leaves its graph, as far as its calls
        were recorded. Undone.
        """
        compiled = self.facts.compiled
        with self.isolated(), run_again(self.view.root, self._leaves(), compiled=compiled):
            restore_rng(self.micros[0].rng)
            return self.micros[0].cuts()

    def makers(self, measure: Measure, micro: int = 0) -> list[Line]:
        """Return the lines that made something of which more is measured than of all that they
        read, on the way to a loss, as far as they were recorded. Undone.
        """
        compiled = self.facts.compiled
        with self.isolated(), run_again(self.view.root, self._leaves(), compiled=compiled):
            restore_rng(self.micros[micro].rng)
            own: Any = self.micros[micro]
            return own.makers(measure) if hasattr(own, "makers") else []

    def made_before(self, micro: int) -> list[Tensor]:
        """Return what a micro-batch reads that the script had made before it called a model."""
        own: Any = self.micros[micro]
        return own.made_before() if hasattr(own, "made_before") else []

    def rows_taken(self, micro: int) -> BatchRows | None:
        """Return which rows of a tensor a micro-batch's samples are, where the script took them by
        an index; None where it did not.
        """
        own = self.micros[micro]
        return own.rows_taken if isinstance(own, TapedMicro) else None

    def data_of(self, micro: int) -> frozenset[str]:
        """Return the entries of a micro-batch that are known to be rows of data: what a loader has
        given, or the script has taken by an index.
        """
        own = self.micros[micro]
        return own.data if isinstance(own, TapedMicro) else frozenset()

    def given_in_objects(self, micro: int) -> dict[str, Tensor]:
        """Return what objects of other classes hold that models are given (a batch of graphs)."""
        return given_in_objects(self.micros[micro])

    def put_in_objects(self, micro: int) -> frozenset[str]:
        """Return the names in ``given_in_objects`` of what runs are known to put there."""
        return self._made.get(micro, frozenset())

    def for_looks(self) -> LoopStep:
        """Return the step as looks run it: as it is."""
        return self

    def obstacle(self) -> str:
        """Return why the window cannot be run again as a whole, or ""."""
        return next((o for o in (m.obstacle() for m in self.micros) if o), "")

    def run(self, micro: int, batch: Batch | None = None) -> Tensor:
        with self.collectives.around(micro, world_size=self.facts.world_size):
            if micro in self.remedies.left_out:
                return torch.zeros(())
            return self._rerun(micro, batch)

    def _rerun(self, micro: int, batch: Batch | None) -> Tensor:
        noted = self.micros[micro]
        restore_rng(noted.rng)
        given = self.remedies.rebatched(noted.batch, micro) if batch is None else batch
        root, compiled = self.view.root, self.facts.compiled
        with (
            self.remedies.under(self.view, micro),
            torch.enable_grad(),  # sinks such as clip_grad_norm_ run without
            run_again(root, self._leaves(), compiled=compiled, host=called_beside(noted)),
            self.replicas.alone(),
            redirected(root),
            kept(tables_given(noted)),
        ):
            held = given_in_objects(noted) if micro not in self._made else {}
            loss = noted.rerun(given)
            if held:
                self._made[micro] = put_there(held, given_in_objects(noted))
            return loss

    def update(self) -> None:
        self.collectives.share(parameters_of(self.view), self.replicas.average)
        mine = [(self.view.optimizer, self.rates)]
        others = [(one, self.rates_of.get(one, ())) for one in self.view.others]
        with ExitStack() as undo:
            for optimizer, rates in mine + others:
                undo.enter_context(at_rates(optimizer, rates, self.usual))
            undo.enter_context(self.collectives.of_update(world_size=self.facts.world_size))
            self.apply(self.view)

    def update_of(self, names: Collection[str]) -> LoopStep:
        first = next((p for n, p in self.view.root.named_parameters() if n in names), None)
        made_by = self.made_by(self.view.optimizer) if self.view.optimizer is not None else ()
        found = [one for one in made_by if any(p is first for p in held_by(one))]
        if not found or self.view.optimizer in found:
            return self
        rates = self.rates_of.get(found[0], learning_rates(found[0]))
        return replace(self, view=self.view.by(found[0]), rates=rates)

    def set_rates(self) -> None:
        """Give the optimizer the learning rates that this window had."""
        set_learning_rates(self.view.optimizer, self.rates)

    def _leaves(self) -> list[Tensor]:
        """Return every tensor that a backward of this window may give a gradient, once."""
        found = {id(p): p for p in parameters_of(self.view).values()}
        found.update((id(t), t) for micro in self.micros for t in micro.leaves())
        return list(found.values())

    @contextmanager
    def isolated(self, *, with_update: bool = False) -> Iterator[None]:
        obstacle = self.obstacle()
        if obstacle:
            raise NanstopError(f"not replayable: {obstacle}", code="NS000")
        leaves = self._leaves()
        root, scaler = self.view.root, self.view.scaler
        changed = trainable_of(self.view) if with_update else Trainable({}, None, scaler)
        with undone(root, leaves, changed, buffers=self.buffers, notes=(self.start,)):
            self.buffers.restore(self.start)
            ready_scaler(scaler)
            yield

    def redo(self, atoms: Mapping[int, tuple[Atom, ...]], until_update: ExitStack) -> None:
        """Make the window's gradients again, each micro-batch under its remedies.

        The random state stays as it is. Where it goes wrong, on any rank, gradients and buffers are
        as before. Gradients keep their storage. Remedies that act on the update are entered on
        ``until_update``, which the caller closes after it.
        """

        def enter() -> None:
            until_update.enter_context(under(self.view, self.remedies.add(atoms)))

        ranks = self.replicas.ranks
        before = [(p, p.grad) for p in self._leaves()]
        tensors = [t for pair in before for t in pair]
        away = _sent_away(before)
        with versions_kept(tensors), self.buffers.rewritten(self.start):
            state, present = note_rng(), self.buffers.note()
            self.buffers.restore(self.start)
            try:
                on_every_rank(ranks, "remedies", enter)
                for leaf, _ in before:
                    leaf.grad = None
                self.replicas.begin()
                for place, micro in enumerate(self.micros):
                    with self.collectives.together(ranks):
                        run = partial(self.run, place)
                        loss = on_every_rank(ranks, f"micro-batch {place}", run)
                    micro.loss = loss if place not in self.remedies.left_out else None
                    if micro.reduced:
                        self.replicas.average()
            except Exception:  # the loop's own code: anything may come out of it
                until_update.close()
                for leaf, _ in before:
                    leaf.grad = None
                away.fetch()
                for leaf, gradient in before:
                    leaf.grad = gradient
                self.buffers.restore(present)
                raise
            finally:
                restore_rng(state)
            for leaf, old in before:
                _keep_storage(leaf, old, away)
            away.fetch()


def _sent_away(gradients: Sequence[tuple[Tensor, Tensor | None]]) -> Away:
    """Have the gradients of tensors away where there is no room for others beside them."""
    if not is_tight(leaf for leaf, _ in gradients):
        return Away(())
    for leaf, _ in gradients:
        leaf.grad = None
    return Away(old for _, old in gradients if old is not None)


def _keep_storage(leaf: Tensor, old: Tensor | None, away: Away) -> None:
    """Put the new gradient where the old one was: loops and wrappers may hold on to that tensor.
    What is ``away`` takes over the memory of the new one.
    """
    new = leaf.grad
    if old is not None and old in away:
        if new is None or new.dtype == old.dtype:
            leaf.grad = None
            away.replace(old, torch.zeros_like(leaf) if new is None else new)
            leaf.grad = old
        return
    if old is None or old.is_sparse or old.requires_grad:
        return
    if new is None:
        # The window did not reach it: it had zeros from `zero_grad(set_to_none=False)`.
        old.zero_()
    elif new.dtype == old.dtype and new.layout == old.layout:
        old.copy_(new)
    else:
        return
    leaf.grad = old
