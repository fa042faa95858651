"""What `nanstop run` adds to the start and the end of a healthy script, and what `nanstop explain`
takes beside an empty program, in seconds of processor time.

Three scripts that train a tiny model for five steps: a plain loop of torch, transformers' Trainer
and TRL's SFTTrainer. Each runs as `python SCRIPT` and as `nanstop run SCRIPT`, interleaved, in
alternating order. Counted is the user and system time of the whole tree of processes, which other
work on the machine moves less than the time on the clock; that one is given beside it. The
difference holds everything: the parent, the injection, opening and closing the watch. nanstop's
own files are compiled as an installation has them.

    python benchmarks/startup.py [--pairs N] [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS = {"torch loop": 0.3, "explain": 0.2}

LOOP = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    loss = model(torch.rand(8, 4)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

MODEL = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
))
rows = [{"input_ids": torch.randint(3, 64, (8,)).tolist()} for _ in range(10)]
settings = dict(output_dir="out", per_device_train_batch_size=2, max_steps=5, report_to=[],
                save_strategy="no", disable_tqdm=True, use_cpu=True)
"""

TRAINER = f"""{MODEL}
from transformers import Trainer, TrainingArguments

rows = [row | {{"labels": row["input_ids"]}} for row in rows]
Trainer(model=model, args=TrainingArguments(**settings), train_dataset=rows).train()
"""

TRL = f"""{MODEL}
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {{f"w{{index}}": index for index in range(64)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
    pad_token="w0", eos_token="w1", unk_token="w2",
)
SFTTrainer(model=model, args=SFTConfig(bf16=False, **settings), processing_class=tokenizer,
           train_dataset=Dataset.from_list(rows)).train()
"""

SCRIPTS = {
    "explain": "",
    "torch loop": LOOP,
    "transformers Trainer": TRAINER,
    "TRL SFTTrainer": TRL,
}


@dataclass(frozen=True)
class Row:
    """Medians in seconds; ``added``: of the differences pair by pair, with its 95 % interval
    (bootstrap).
    """

    script: str
    plain_cpu: float
    watched_cpu: float
    added_cpu: float
    low: float
    high: float
    ratio: float
    plain_wall: float
    watched_wall: float
    added_wall: float


def timed(command: Sequence[str], folder: str) -> tuple[float, float]:
    """Return processor and clock seconds of a command with all its children; it must succeed."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NANSTOP": ""}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, wall


def measure(name: str, pairs: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPTS[name])
        plain = [sys.executable, str(script)]
        ours = ["explain", "NS201"] if name == "explain" else ["run", str(script)]
        watched = [sys.executable, "-m", "nanstop", *ours]
        for each in (plain, watched):  # caches of the file system and of the libraries
            timed(each, folder)
        summary = Path(folder, ".nanstop", "summary.json")
        if ours[0] == "run" and json.loads(summary.read_text())["steps"] != 5:
            sys.exit(f"{name}: the five steps were not watched")
        seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "watched": []}
        for pair in range(pairs):
            order = (("plain", plain), ("watched", watched))
            for which, command in order if pair % 2 else order[::-1]:
                seconds[which].append(timed(command, folder))
    return row(name, seconds["plain"], seconds["watched"])


def row(
    name: str, plain: Sequence[tuple[float, float]], watched: Sequence[tuple[float, float]]
) -> Row:
    added = [(w[0] - p[0], w[1] - p[1]) for p, w in zip(plain, watched, strict=True)]
    added_cpu = [cpu for cpu, _ in added]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(added_cpu, k=len(added))) for _ in range(4000))
    plain_cpu, plain_wall = (statistics.median(each) for each in zip(*plain, strict=True))
    watched_cpu, watched_wall = (statistics.median(each) for each in zip(*watched, strict=True))
    return Row(
        script=name,
        plain_cpu=plain_cpu,
        watched_cpu=watched_cpu,
        added_cpu=statistics.median(added_cpu),
        low=medians[int(0.025 * len(medians))],
        high=medians[int(0.975 * len(medians))],
        ratio=watched_cpu / plain_cpu,
        plain_wall=plain_wall,
        watched_wall=watched_wall,
        added_wall=statistics.median(wall for _, wall in added),
    )


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="What `nanstop run` adds to a healthy script (seconds)")
    for name in ("script", "plain", "watched", "added", "95 % interval", "ratio", "on the clock"):
        shown.add_column(name, justify="left" if name == "script" else "right")
    for one in rows:
        shown.add_row(
            one.script,
            f"{one.plain_cpu:.2f}",
            f"{one.watched_cpu:.2f}",
            f"{one.added_cpu:.2f}",
            f"{one.low:.2f} .. {one.high:.2f}",
            f"{one.ratio:.3f}",
            f"{one.added_wall:+.2f}",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", default="", help="scripts whose name holds this word")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    setting = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "transformers", "trl")},
    }
    rows: list[Row] = []
    for name in SCRIPTS:
        if options.only in name:
            rows.append(measure(name, options.pairs))
            print(rows[-1], flush=True)
            written = {"setting": setting | vars(options), "rows": [asdict(one) for one in rows]}
            (RESULTS / "startup.json").write_text(json.dumps(written, indent=2) + "\n")
    Console().print(table(rows))
    return int(any(one.low > LIMIT_SECONDS.get(one.script, 0.5) for one in rows))


if __name__ == "__main__":
    sys.exit(main())
