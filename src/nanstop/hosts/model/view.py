"""What remedies and the tracer must know of any ``nn.Module``, found by structure alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.errors import NanstopError
from nanstop.hosts import compat
from nanstop.hosts.model.optimizer_facts import optimizer_facts
from nanstop.numerics.modules import repeated_blocks
from nanstop.replay.rng import note_rng, restore_rng
from nanstop.replay.step import Batch

_View = TypeVar("_View", bound="StructureView")
_KERNELS = ("eager", "sdpa")


class StructureView(ABC):
    """What ``replay.step.ModelView`` asks that the modules of a model tell, whoever trains it."""

    root: nn.Module
    """What is trained."""

    @property
    def others(self) -> tuple[Optimizer, ...]:
        return ()

    def by(self: _View, optimizer: Optimizer) -> _View:
        """See ``replay.step.ModelView``."""
        del optimizer  # there are no others
        return self

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """Return what has the config and the switches: the root, or what it wraps."""

    @property
    def device_type(self) -> str:
        parameters = list(self.root.parameters())
        trainable = [p for p in parameters if p.requires_grad] or parameters
        return trainable[0].device.type if trainable else "cpu"

    def attention(self) -> str | None:
        return getattr(getattr(self.model, "config", None), "_attn_implementation", None)

    def attention_choices(self) -> tuple[str, ...]:
        present = self.attention()
        if present is None or self._switch() is None:
            return ()
        supported = {"eager": True, "sdpa": getattr(self.model, "_supports_sdpa", True)}
        return tuple(k for k in _KERNELS if k != present and supported[k])

    def set_attention(self, kernel: str) -> None:
        switch = self._switch()
        if switch is None:
            kind = type(self.model).__name__
            raise NanstopError(f"{kind} has no switch for its attention kernel")
        switch(kernel)

    def embedding(self) -> str | None:
        """Return the table of the tokens; what cuts pictures or sound into pieces is none."""
        declared = self._declared("get_input_embeddings")
        if declared is not None:
            return declared if _table_of(self.root.get_submodule(declared)) is not None else None
        tables = [(n, m) for n, m in self.root.named_modules() if isinstance(m, nn.Embedding)]
        return max(tables, key=lambda entry: entry[1].num_embeddings)[0] if tables else None

    def head(self) -> str | None:
        """Return what the model says that it is, else the last part with weights beside the body of
        a transformers model.
        """
        declared = self._declared("get_output_embeddings")
        if declared is not None:
            return declared
        model = compat.base_model(self.model)
        body: Any = getattr(model, "base_model", None)
        if not isinstance(body, nn.Module) or body is model:
            return None
        beside = [m for m in model.children() if m is not body and list(m.parameters())]
        return self._name_of(beside[-1]) if beside else None

    def logits(self, ids: Tensor) -> Tensor | None:
        """See ``replay.step.ModelView``. Of no batch: its mask would hide what a token does."""
        model = compat.base_model(self.model)
        generates = getattr(model, "can_generate", None)
        reads_apart = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        if not callable(generates) or not generates() or reads_apart:
            return None
        rng = note_rng()
        try:
            with torch.no_grad(), self.computing():
                output = self.model(input_ids=ids, use_cache=False)
        finally:
            restore_rng(rng)
        return getattr(output, "logits", None)

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context that the run calls its model in, as far as it is known."""
        return nullcontext()

    def _switch(self) -> Any:
        return getattr(self.model, "set_attn_implementation", None)

    def _declared(self, getter: str) -> str | None:
        """Return the name of the module that the model itself points at through ``getter``, if
        it has one.
        """
        ask = getattr(self.model, getter, None)
        try:
            found = ask() if callable(ask) else None
        except (NotImplementedError, AttributeError):  # transformers' ways to say that it has none
            return None
        return self._name_of(found)

    def _name_of(self, module: Any) -> str | None:
        return next((n for n, m in self.root.named_modules() if m is module and n), None)


class PlainView(StructureView):
    """See ``replay.step.ModelView``.

    Wrappers (DDP, compiled modules, PEFT) are looked through for the model's config.
    ``others``: returns the other optimizers that train weights of a model beside one; ``lines_of``:
    the lines that made an optimizer and its schedule, as fields of ``RunFacts``.
    """

    def __init__(
        self,
        root: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
        others: Callable[[nn.Module, Optimizer], tuple[Optimizer, ...]] = lambda *_: (),
        lines_of: Callable[[Optimizer | None], Mapping[str, Any]] = lambda _: {},
    ) -> None:
        self.root = root
        self.optimizer = optimizer
        self.scaler = scaler
        self.beside: list[nn.Module] = []
        self._others = others
        self._lines_of = lines_of

    @property
    def others(self) -> tuple[Optimizer, ...]:
        return self._others(self.root, self.optimizer) if self.optimizer is not None else ()

    def by(self: _View, optimizer: Optimizer) -> _View:
        view: Any = copy(self)
        view.optimizer = optimizer
        return view

    def about_optimizer(self) -> dict[str, Any]:
        lines = self._lines_of(self.optimizer)
        return {**lines, "optimizer": optimizer_facts(self.optimizer, self.root)}

    def met(self, module: nn.Module) -> None:
        self.beside.append(module)

    def head(self) -> str | None:
        """Return, where the model shows none, the linear layer whose width is the embedding's
        number of rows, else the last one outside the blocks.
        """
        shown = super().head()
        if shown is not None:
            return shown
        blocks = repeated_blocks(self.root)
        linear = [
            (name, module)
            for name, module in self.root.named_modules()
            if isinstance(module, nn.Linear) and not any(is_inside(name, b) for b in blocks)
        ]
        table = self.embedding()
        held = _table_of(self.root.get_submodule(table)) if table is not None else None
        rows = held.shape[0] if held is not None else None
        matching = [name for name, module in linear if module.out_features == rows]
        names = matching or [name for name, _ in linear]
        return names[-1] if names else None

    def token_ids(self, batch: Batch) -> Tensor | None:
        if self.embedding() is None:
            return None
        named = batch.get("input_ids")
        if isinstance(named, Tensor):
            return named
        return next((v for v in batch.values() if _looks_like_ids(v)), None)

    @property
    def model(self) -> nn.Module:
        """Return the outermost module that carries a config, or the root."""
        return next(
            (m for m in self._nested() if getattr(m, "config", None) is not None), self.root
        )

    def _nested(self) -> Iterator[nn.Module]:
        module: Any = self.root
        while isinstance(module, nn.Module):
            yield module
            children = dict(module.named_children())  # TorchScript holds them in no dict
            module = children.get("module") or children.get("_orig_mod")


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is ``outer`` or a part of it; "" is the whole model."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def _looks_like_ids(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() == 2
    )


def _table_of(module: nn.Module) -> Tensor | None:
    """Return the matrix that a module looks rows up in, also where an adapter is wrapped around it;
    None where it has no such.
    """
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None
