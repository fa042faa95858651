"""A config file of ``trl sft|dpo|grpo|...`` read as TRL itself reads it, and the facts of the
run that it describes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanstop.errors import NanstopError, unknown
from nanstop.hosts import compat
from nanstop.hosts.trainer.options import objective_of, planned_optimizer, precision_of, schedule_of
from nanstop.numerics import accelerator
from nanstop.records import (
    AdapterFacts,
    HeadFacts,
    ParamGroup,
    QuantizedFacts,
    RunFacts,
)
from nanstop.store.config_file import config_lines, load_config

COMMANDS = ("sft", "dpo", "grpo", "reward", "kto", "rloo")
_WEIGH_KL = ("grpo", "rloo")
_OWN = ("env", "accelerate_config")
"""Keys that TRL takes out of a config before its parser sees it."""


def read_config(path: Path, *, without: str = "") -> tuple[RunFacts, str]:
    """Return the facts of the run that a config file describes, and what was unclear in it.

    No model is loaded. ``without``: a key that is left out.

    Which command it is for is told by its keys; where several fit, the first of ``COMMANDS``, and
    that is said. Errors: ``NanstopError`` NS001 for a file that is no mapping, a key that no
    command knows (with its line), or values that TRL refuses.
    """
    if find_spec("trl") is None:
        raise NanstopError("a config file is read with TRL's own parser", hint="pip install trl")
    settings, lines = load_config(path), config_lines(path)
    settings.pop(without, None)
    if "model_type" in settings or "architectures" in settings:
        raise NanstopError(
            f"{path} describes a model, not a training",
            hint="a checkpoint is checked as its folder, which has the weights too",
        )
    parsers = {name: import_module(f"trl.scripts.{name}").make_parser() for name in COMMANDS}
    launching = _launch_options()
    strange = {
        name: [key for key in settings if key not in _known(parser) and key not in launching]
        for name, parser in parsers.items()
    }
    fewest = min(map(len, strange.values()))
    fitting = [name for name in COMMANDS if len(strange[name]) == fewest]
    command = fitting[0]
    if fewest:
        key = strange[command][0]
        what = f"key of `trl {'|'.join(fitting)}` in {path}, line {lines[key].line}"
        raise unknown(what, key, sorted(_known(parsers[command])))
    args, model = _parsed(path, parsers[command], settings)
    facts = _facts(command, args, model, uses_cpu=bool(settings.get("use_cpu")))
    unclear = replace(facts, objective=None)  # beta means one thing here and another there
    several = f"its keys fit trl {', '.join(fitting)}: read as that of `trl {command}`"
    known = facts if len({name in _WEIGH_KL for name in fitting}) == 1 else unclear
    return known, several if len(fitting) > 1 else ""


def _known(parser: Any) -> set[str]:
    return {action.dest for action in parser._actions} | set(_OWN)


def _launch_options() -> set[str]:
    """Return the options that ``trl`` hands on to ``accelerate launch``."""
    from accelerate.commands.launch import launch_command_parser

    return {action.dest for action in launch_command_parser()._actions}


def _parsed(path: Path, parser: Any, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the training arguments and the model's config, made by TRL's own parser."""
    given = {key: value for key, value in settings.items() if key not in _OWN}
    if accelerator.kind() is None:
        given["use_cpu"] = True  # options that this machine has no device for are not refused here
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.set_defaults_with_config(**given)
            _, args, model, *_ = parser.parse_args_into_dataclasses(
                args=[], return_remaining_strings=True
            )
    except SystemExit as error:
        why = said.getvalue().strip().rsplit("error: ", 1)[-1]
        raise NanstopError(f"{path}: {why}") from error
    except (ValueError, TypeError, ImportError) as error:
        raise NanstopError(f"{path}: {' '.join(str(error).split())}") from error
    return args, model


def _facts(command: str, args: Any, model: Any, *, uses_cpu: bool) -> RunFacts:
    saved = compat.saved_config(str(model.model_name_or_path or ""))
    adapted = bool(model.use_peft)
    quantized = _quantized(model)
    stored = _stored(model, saved)
    groups = () if quantized is not None or stored is None else (_group(stored, adapted=adapted),)
    scores = command == "reward"
    return RunFacts(
        host=f"trl {command}",
        param_groups=groups,
        autocast=None if uses_cpu else precision_of(args).requested,
        attention=model.attn_implementation,
        quantization=f"bitsandbytes-{quantized.bits}bit" if quantized is not None else None,
        peft="LORA" if adapted else None,
        task="sequence_classification" if scores else "causal_lm",
        optimizer=planned_optimizer(args),
        clip=args.max_grad_norm or None,
        num_micro=args.gradient_accumulation_steps,
        batch_shape=(args.per_device_train_batch_size,),
        model_type=saved.get("model_type"),
        declared_dtype=compat.dtype_of(saved),
        nan_inf_filter=bool(args.logging_nan_inf_filter),
        device="cpu" if uses_cpu else accelerator.kind() or "",
        precision=precision_of(args),
        quantized=quantized,
        adapter=_adapter(model) if adapted else None,
        head=HeadFacts(module="score", trained=_trains_score(model)) if scores else None,
        schedule=schedule_of(args, None),
        objective=objective_of(args),
    )


def _stored(model: Any, saved: dict[str, Any]) -> str | None:
    """Return the format that the weights are loaded in."""
    asked = str(model.dtype) if model.dtype is not None else None
    return compat.dtype_of(saved) if asked == "auto" else asked


def _group(dtype: str, *, adapted: bool) -> ParamGroup:
    return ParamGroup(dtype=dtype, trainable=not adapted, num_tensors=0, num_elements=0)


def _quantized(model: Any) -> QuantizedFacts | None:
    """Return what ``trl.get_quantization_config`` makes of the options."""
    if not (model.load_in_4bit or model.load_in_8bit):
        return None
    return QuantizedFacts(
        method="bitsandbytes",
        bits=4 if model.load_in_4bit else 8,
        compute_dtype=str(model.dtype) if model.load_in_4bit and model.dtype != "auto" else None,
        num_adapted=int(bool(model.use_peft)),
    )


def _adapter(model: Any) -> AdapterFacts:
    return AdapterFacts(
        kind="LORA",
        task_type=model.lora_task_type,
        target_modules=tuple(model.lora_target_modules or ()),
        modules_to_save=tuple(model.lora_modules_to_save or ()),
        rank=model.lora_r,
        alpha=float(model.lora_alpha),
    )


def _trains_score(model: Any) -> bool:
    saved = model.lora_modules_to_save or ()
    return not model.use_peft or model.lora_task_type == "SEQ_CLS" or "score" in saved
