"""Versions, devices and settings of the machine that a run happens on, as a record."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

from nanstop.own_code import is_library
from nanstop.records import CommandFacts, Environment
from nanstop.store.config_file import CONFIGS

PACKAGES = (
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "deepspeed",
    "lerobot",
    "lightning",
    "flash-attn",
    "flash-attn-4",
    "transformer-engine",
    "xformers",
    "liger-kernel",
    "unsloth",
    "vllm",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
)
CUBLAS_PACKAGES = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")

ENV_VARS = (
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "NANSTOP",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "RANK",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TORCH_CUDNN_V8_API_DISABLED",
    "WORLD_SIZE",
)
"""All that is ever read from the environment:
settings that move numerics, never paths, names or tokens.
"""

_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)
_OPTION = re.compile(r"--[A-Za-z][\w-]*")

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def environment(*, import_torch: bool = False) -> Environment:
    """Return what is known of this machine.

    Packages are named by their installed metadata and never imported. Torch's own facts (devices,
    flags) are read where torch is already imported, or with ``import_torch``. A CUDA device is
    asked for its name and capability only where this process has initialised CUDA or
    ``import_torch`` is set: a record must not claim a GPU. No synchronisation.
    """
    if import_torch:
        import torch  # noqa: F401  found in sys.modules below
    torch_module = sys.modules.get("torch")
    device = _device(torch_module, initialise=import_torch) if torch_module else {}
    flags = _flags(torch_module) if torch_module else ()
    return Environment(
        nanstop=own_version(),
        python=platform.python_version(),
        torch=_version("torch"),
        driver=_driver(),
        packages=tuple((name, found) for name in PACKAGES if (found := _version(name))),
        flags=flags,
        env_vars=tuple((name, os.environ[name]) for name in ENV_VARS if name in os.environ),
        command=None,  # said of a run alone
        **device,
    )


def command() -> CommandFacts:
    """Return what was started: the user's own script, its config file, the names of its options.

    None of a library's command (``trl sft``) is a script of the user's. No value is kept.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path(main).absolute() if main else None
    installed = script is None or is_library(str(script))
    if script is not None and script.parent == Path(sys.executable).parent:
        installed = True  # a console script
    words = sys.argv[1:]
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    configs = (Path(one) for one in values if one.endswith(CONFIGS))
    config = next((str(one.absolute()) for one in configs if one.is_file()), None)
    names = (_OPTION.match(word) for word in words)
    return CommandFacts(
        script=None if installed else str(script),
        config=config,
        options=tuple(dict.fromkeys(name[0] for name in names if name is not None)),
        supervised="NANSTOP_RUN" in os.environ,
    )


def own_version() -> str:
    """Return the version of nanstop, "unknown" where it is not installed as a package."""
    return _version("nanstop") or "unknown"


def _version(package: str) -> str | None:
    """Return the version of an installed package. Its headers are not parsed whole, of which its
    whole description is a part: that of twenty packages takes longer than all else asked here.
    """
    try:
        known = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    found = _VERSION.search(known.read_text("METADATA") or "")
    return found[1] if found else known.version


def _driver() -> str | None:
    """Return the version of the loaded NVIDIA kernel module (Linux), or None."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER_FILE.read_text(errors="replace"))
    except OSError:
        return None
    return found.group(1) if found else None


def _device(torch: ModuleType, *, initialise: bool) -> dict[str, str | None]:
    """Return the device fields of ``Environment``: libraries of the build, and the GPU where one
    is in use.
    """
    facts: dict[str, str | None] = {"cuda": torch.version.cuda}
    if torch.version.cuda is not None:
        cudnn = torch.backends.cudnn.version()
        facts["cublas"] = next(filter(None, map(_version, CUBLAS_PACKAGES)), None)
        facts["cudnn"] = str(cudnn) if cudnn else None
    if torch.cuda.is_initialized() or (initialise and torch.cuda.is_available()):
        major, minor = torch.cuda.get_device_capability()
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}
    return facts


def _flags(torch: ModuleType) -> tuple[tuple[str, str], ...]:
    """Return the settings of torch that change how numbers come out."""
    deterministic = torch.utils.deterministic
    flags = {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": deterministic.fill_uninitialized_memory,
        "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "anomaly_mode": torch.is_anomaly_enabled(),
        "num_threads": torch.get_num_threads(),
    }
    return tuple((name, str(value)) for name, value in flags.items())
