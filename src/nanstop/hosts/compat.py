"""Differences between versions and shapes of the host libraries, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.errors import NanstopError

_CHECKPOINTING = "activation_checkpointing"
_COPIES = (nn.parallel.DistributedDataParallel, nn.DataParallel)

_SEAMS = (
    "train",
    "training_step",
    "prediction_step",
    "evaluate",
    "save_model",
    "_prepare_inputs",
    "_save_checkpoint",
    "_maybe_log_save_evaluate",
    "accelerator.clip_grad_norm_",
    "callback_handler.on_pre_optimizer_step",
)
"""What a watch on a trainer stands in for: in every transformers from 4.57 on."""


def missing_seams(trainer: Any) -> tuple[str, ...]:
    """Return the names of what a watch needs of a trainer and this one lacks."""
    return tuple(name for name in _SEAMS if not callable(_reach(trainer, name)))


def described(trainer: Any) -> str:
    """Return a trainer's class and the version of transformers that it is of."""
    import transformers

    return f"{type(trainer).__name__} of transformers {transformers.__version__}"


def not_watched(trainer: Any, error: Exception) -> str:
    """Return the sentence that says why a training goes on unwatched."""
    why = error.message if isinstance(error, NanstopError) else f"{type(error).__name__}: {error}"
    where = "" if isinstance(error, NanstopError) else f" of {described(trainer)}"
    return f"this training{where} goes on unwatched: {why}"


def _reach(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def unwrapped_optimizer(optimizer: Any) -> Optimizer | None:
    """Return the optimizer under accelerate's wrapper, which the script or the trainer made and
    whose ``step`` is the update; None before there is one.

    What holds the moments may lie deeper: ``numerics.optimizer_state.innermost``.
    """
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        inner = optimizer.optimizer
        if not isinstance(inner, Optimizer):  # an engine's, which is no torch optimizer
            break
        optimizer = inner
    return optimizer if isinstance(optimizer, Optimizer) else None


def run_scaler(trainer: Any) -> Any:
    """Return the ``GradScaler`` that the host steps with, or None."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def unscale(trainer: Any) -> None:
    """Unscale the gradients unless that has been done in this window.

    The scaler refuses a second time.
    """
    scaler = run_scaler(trainer)
    states = scaler._per_optimizer_states.values() if scaler is not None else ()
    if not states or not any(state["stage"].name == "UNSCALED" for state in states):
        trainer.accelerator.unscale_gradients()


def present_scale(scaler: Any) -> Tensor | None:
    """Return a copy of the loss scale on its device, or None.

    No synchronisation, unlike ``get_scale``.
    """
    scale = scaler._get_scale_async() if scaler is not None else None
    return scale.clone() if scale is not None else None


def optimizers_of(trainer: Any) -> tuple[Any, ...]:
    """Return the wrapped optimizers that accelerate unscales and asks whether a step was
    skipped.
    """
    return tuple(trainer.accelerator._optimizers) or (trainer.optimizer,)


def own_clip(trainer: Any) -> Callable[[nn.Module], Any] | None:
    """Return the trainer's own way to clip, None where it does not clip or has no method for it
    (transformers < 5.3).
    """
    limit = trainer.args.max_grad_norm
    return getattr(trainer, "_clip_grad_norm", None) if limit is not None and limit > 0 else None


def world_size(trainer: Any) -> int:
    """Return how many processes the trainer's accelerator trains with."""
    return int(trainer.accelerator.num_processes)


def is_plain(trainer: Any) -> bool:
    """Return whether gradients are ordinary tensors on one device, clipped by torch itself:
    in one process, or in several that have a copy of the model each.
    """
    kind = getattr(
        trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type
    )
    copies = isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    alone = str(kind) in ("NO", "DistributedType.NO")
    return (alone or copies) and trainer.args.n_gpu <= 1


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module under torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        inner: Any = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, _COPIES):
            inner = model.module
        if inner is None:
            return model
        model = inner


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a PEFT wrapper, or ``model`` itself."""
    get: Any = getattr(model, "get_base_model", None)
    return get() if get is not None else model


def position(trainer: Any) -> int | None:
    """Return which slice of its buffer a trainer takes next (GRPO, RLOO).

    None for one without a buffer.
    """
    step = getattr(trainer, "_step", None)
    return step if isinstance(step, int) else None


def makes_batches(trainer: Any) -> bool:
    """Return whether a trainer makes its batches by itself (GRPO, RLOO generate them), and does not
    only move to the device what its loader gives.
    """
    owner = next(c for c in type(trainer).__mro__ if "_prepare_inputs" in vars(c))
    return owner.__module__ != "transformers.trainer"


def advance_position(trainer: Any) -> None:
    """Move on to the next buffered slice.

    TRL does so in ``_prepare_inputs`` before 1.0, since then in ``training_step``.
    """
    if position(trainer) is not None:
        trainer._step += 1


def declared_dtype(config: Any) -> str | None:
    """Return the format of the checkpoint that a config came from.

    Loading overwrites the config's own note of it.

    Looks at the saved ``config.json`` in the folder or the local hub cache (never the network),
    then at ``config``.
    """
    if config is None:
        return None
    saved = saved_config(str(getattr(config, "_name_or_path", "") or ""))
    text = getattr(config, "text_config", None)
    found = dtype_of(saved) or getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return str(found).removeprefix("torch.") if found is not None else None


def dtype_of(saved: dict[str, Any]) -> str | None:
    """Return the format that a saved ``config.json`` declares, in its own words or those of its
    text part.
    """
    text = saved.get("text_config")
    parts = (saved, text if isinstance(text, dict) else {})
    found = (part.get(name) for part in parts for name in ("dtype", "torch_dtype"))
    return next((str(each) for each in found if each is not None), None)


def saved_config(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a folder or of the local hub cache (never the network).

    {} without one.
    """
    path = Path(name, "config.json") if name else None
    if path is not None and not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(name, "config.json")
        except ValueError:  # not a repository id
            cached = None
        path = Path(cached) if isinstance(cached, str) else None
    if path is None:
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def recomputes(args: Any, model: nn.Module) -> bool:
    """Return whether activations are recomputed in backward."""
    asked, _ = _checkpointing(args)
    return asked or any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def will_recompute_reentrantly(args: Any) -> bool:
    """Return whether the options switch on reentrant checkpointing.

    The default was reentrant before transformers 5.
    """
    asked, options = _checkpointing(args)
    return asked and bool(options.get("use_reentrant", _transformers_major() < 5))


def will_require_input_grads(args: Any, model: nn.Module) -> bool:
    """Return whether ``train()`` makes the embedding's output require gradients when it switches
    checkpointing on.

    transformers 5 does so for every model that reads token ids, earlier versions for adapters of
    their own only.
    """
    asked, _ = _checkpointing(args)
    always = callable(getattr(model, "gradient_checkpointing_enable", None))
    reads_ids = always and getattr(model, "main_input_name", "") == "input_ids"
    everyone = reads_ids and _transformers_major() >= 5
    return asked and bool(everyone or getattr(model, "_hf_peft_config_loaded", False))


def _transformers_major() -> int:
    import transformers

    return int(transformers.__version__.partition(".")[0])


def _checkpointing(args: Any) -> tuple[bool, dict[str, Any]]:
    """Return whether checkpointing is asked for, and how (later versions of transformers 5
    renamed the option).
    """
    name = _CHECKPOINTING if hasattr(args, _CHECKPOINTING) else "gradient_checkpointing"
    return bool(getattr(args, name)), dict(getattr(args, f"{name}_kwargs", None) or {})


def checkpoint_path(trainer: Any, given: Any) -> str | None:
    """Return the checkpoint that ``train(resume_from_checkpoint=given)`` starts from.

    None for a fresh start.
    """
    if given is True:
        from transformers.trainer_utils import get_last_checkpoint

        folder = Path(trainer.args.output_dir)
        return get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return str(given) if given else None


def loss_is_scaled(trainer: Any) -> bool | None:
    """Return what a trainer is told of its loss: that it is divided by the whole window, that it is
    not, or None. Transformers before 5 is told nothing.
    """
    return getattr(trainer, "loss_is_scaled_for_ga", None)


def divides_loss(trainer: Any) -> bool:
    """Return whether a trainer divides each loss by the number of micro-batches, and does not
    leave it to the loss to divide by the tokens of the window.
    """
    declared = loss_is_scaled(trainer)
    takes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return not (takes if declared is None else declared)
