"""The smallest real Step: a model, an optimizer, a loss function and some micro-batches."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from nanstop.hosts.model.optimizer_facts import optimizer_facts
from nanstop.records import RunFacts, StepId
from nanstop.replay.collectives import Collectives
from nanstop.replay.rng import note_rng, restore_rng


class FnView:
    """ModelView of a bare module."""

    def __init__(self, root: nn.Module, optimizer=None) -> None:
        self.root, self.optimizer, self.scaler = root, optimizer, None
        self.others = ()
        self.device_type = "cpu"
        self.beside = []
        self.met = self.beside.append

    def by(self, optimizer):
        return FnView(self.root, optimizer)

    def about_optimizer(self):
        return {"optimizer": optimizer_facts(self.optimizer, self.root)}

    def attention(self):
        return getattr(getattr(self.root, "config", None), "_attn_implementation", None)

    def attention_choices(self):
        return tuple(k for k in ("eager", "sdpa") if self.attention() not in (None, k))

    def set_attention(self, kernel):
        self.root.set_attn_implementation(kernel)

    def head(self):
        return None

    def embedding(self):
        return None

    def token_ids(self, batch):
        return batch.get("input_ids")

    def logits(self, ids):
        return None


class FnStep:
    """``loss_fn(model, batch)`` is run forward and backward on each batch."""

    calls_script = False

    def __init__(self, model, loss_fn, batches, optimizer=None, world_size=1) -> None:
        self.id = StepId(run="test", step=0)
        self.view = FnView(model, optimizer)
        self.facts = RunFacts(world_size=world_size)
        self.collectives = Collectives()
        self.batches = tuple(batches)
        self.losses = (None,) * len(self.batches)
        self.rates = ()
        self._loss_fn = loss_fn
        self._rng = note_rng()
        self._updating = False

    def learned(self, **facts):
        self.facts = replace(self.facts, **facts)

    def run(self, micro, batch=None):
        restore_rng(self._rng)
        with self.collectives.around(micro, world_size=self.facts.world_size):
            loss = self._loss_fn(self.view.root, self.batches[micro] if batch is None else batch)
            loss.backward()
        return loss.detach()

    def update_of(self, names):
        return self

    def update(self):
        self.view.optimizer.step()

    @contextmanager
    def isolated(self, *, with_update=False):
        root, optimizer = self.view.root, self.view.optimizer
        state = note_rng()
        grads = [(p, p.grad) for p in root.parameters()]
        changed = root.buffers() if self._updating else (*root.parameters(), *root.buffers())
        kept = [(t, t.detach().clone()) for t in changed]
        outer, self._updating = self._updating, self._updating or with_update
        saved = copy.deepcopy(optimizer.state_dict()) if with_update else None
        for parameter, _ in grads:
            parameter.grad = None
        try:
            yield
        finally:
            self._updating = outer
            restore_rng(state)
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for tensor, copy_of in kept:
                    tensor.copy_(copy_of)
            if saved is not None:
                optimizer.load_state_dict(saved)
