"""The small instruction and preference data set that ships with nanstop:
321 rows, loaded without a network.

Each row of ``data.jsonl`` is ``prompt``, ``chosen`` (a right answer), ``rejected`` (a wrong or bad
one) and ``split``.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "test"]


def rows(split: Split) -> list[dict[str, str]]:
    """Return the rows of one split, each with ``prompt``, ``chosen`` and ``rejected``."""
    text = files("nanstop.demo").joinpath("data.jsonl").read_text(encoding="utf-8")
    parsed = [json.loads(line) for line in text.splitlines()]
    return [
        {key: row[key] for key in ("prompt", "chosen", "rejected")}
        for row in parsed
        if row["split"] == split
    ]


def preferences(split: Split) -> Dataset:
    """Return ``prompt``, ``chosen``, ``rejected`` as chat messages:
    what DPOTrainer and RewardTrainer read.
    """
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "chosen": [{"role": "assistant", "content": row["chosen"]}],
                "rejected": [{"role": "assistant", "content": row["rejected"]}],
            }
            for row in rows(split)
        ]
    )


def conversations(split: Split) -> Dataset:
    """Return ``messages``, the prompt and its right answer: what SFTTrainer reads."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["chosen"]},
                ]
            }
            for row in rows(split)
        ]
    )
