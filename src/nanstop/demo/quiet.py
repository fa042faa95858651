"""Surroundings of a demonstration: one thread, no network, and only its own words on the terminal."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRL_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what trainers print on stdout, warn and draw; threads, warnings and logging are put back on exit.

    The environment variables and the progress bars stay as set: their libraries read them once.
    """
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    import datasets
    import torch
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)  # models of this size are slower on two
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)
