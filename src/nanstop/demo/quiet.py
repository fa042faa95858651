"""Surroundings of a demonstration:
one thread, no network, and only its own words on the terminal.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRL_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what trainers print on stdout, warn and draw;
    threads, warnings and logging are put back on exit.

    The environment variables and the progress bars stay as set: their libraries read them once.
    """
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    set_aside_broken("bitsandbytes")
    import datasets
    import torch
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models of this size are slower on two
    try:
        with _unlogged(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Have loggers say no more than errors inside."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)


def set_aside_broken(package: str) -> None:
    """Have an optional package that raises when it is imported count as absent in this process;
    told once.

    peft and transformers import it as soon as they find it, and cannot be imported themselves if it
    raises.
    """
    modules: dict[str, Any] = sys.modules  # None stands for a module that is not to be found
    if package in modules or find_spec(package) is None:
        return
    try:
        with _unlogged():  # it warns of each kernel that it cannot have
            import_module(package)
    except Exception as error:
        modules[package] = None
        logging.getLogger("nanstop").warning(
            "nanstop: %s cannot be imported and counts as absent: %s", package, error
        )
