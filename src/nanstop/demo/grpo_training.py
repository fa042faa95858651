"""S3's training, as a user would have it:
`python grpo_training.py --config grpo_failing.yaml` (TRL issue 2906).

The machine is played as well: on an H20, cuBLAS 12.1 divides an integer by zero while it plans some
bfloat16 products, and the process dies by SIGFPE. Here the CPU's own product does that, for the
shapes of one layer.
"""

# pyright: reportPrivateImportUsage=false
# (trl offers its names by `__getattr__`)

from __future__ import annotations

import os
import signal
import warnings
from typing import Any, cast

import torch
from torch import Tensor

INNER, OUTER = 128, 64
"""Shape of the weight whose product kills:
that of every MLP's second projection in the model below.
"""


def play_h20() -> torch.library.Library:
    """Return what makes ``aten::mm`` of the CPU die as cuBLAS does on an H20, for as long as it
    is held.
    """
    played = torch.library.Library("aten", "IMPL")

    def mm(left: Tensor, right: Tensor) -> Tensor:
        if left.dtype is torch.bfloat16 and tuple(right.shape) == (INNER, OUTER):
            signal.raise_signal(signal.SIGFPE)
        return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is the point
        played.impl("mm", mm, "CPU")
    return played


def num_words(completions: list[Any], **_: Any) -> list[float]:
    """Return the reward of each completion: its number of words."""
    return [float(len(each[0]["content"].split())) for each in completions]


def main() -> None:
    """Train as the options say."""
    from trl import GRPOConfig, GRPOTrainer, TrlParser

    from nanstop.demo import data, tiny

    (args,) = TrlParser(cast("Any", GRPOConfig)).parse_args_and_config()
    torch.set_num_threads(1)
    prompts = data.preferences("train").select_columns(["prompt"])
    trainer = GRPOTrainer(
        model=tiny.qwen2(hidden_size=OUTER, intermediate_size=INNER),
        reward_funcs=cast("Any", num_words),
        args=args,
        train_dataset=prompts,
        processing_class=tiny.tokenizer(),
    )
    trainer.train()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    machine = play_h20()
    main()
