"""How fast `nanstop scan` reads a checkpoint, against a plain `tensor.abs().max()` over the same
files.

A synthetic sharded safetensors checkpoint for each format, an embedding and layers of normal
weights, in the page cache. Scan and plain pass alternate, so that a busy machine slows both; each
ratio is taken within one pair (above 1: scan is faster). `aminmax` is the fastest pass that torch
has, for comparison. Memory: growth of the peak resident set over that of a process which has
scanned a small file. Bound: median ratio 0.8.

    python benchmarks/scan.py [--pairs N] [--megabytes N] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanstop.commands.scan.scan import scan

BOUND = 0.8
WIDTH = 1024
FORMATS = (torch.float32, torch.float16, torch.bfloat16)
PEAK = """
import resource, sys, torch
from pathlib import Path
from nanstop.commands.scan.scan import scan
torch.set_num_threads(int(sys.argv[1]))
def peak(path):
    scan(Path(path))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
small = peak(sys.argv[2])
print(peak(sys.argv[3]) - small)
"""


def build(folder: Path, dtype: torch.dtype, megabytes: int) -> Path:
    """Two shards; one part in eight of the bytes is the embedding."""
    folder.mkdir()
    rows = megabytes * 2**20 // dtype.itemsize // WIDTH
    layers = 2 * max(1, rows * 7 // 8 // (2 * 4096))
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": 4096 for n in range(layers)}
    names, index = list(tensors), {}
    for shard, held in enumerate((names[: layers // 2], names[layers // 2 :])):
        made = {name: weights(tensors[name], dtype) for name in held}
        if shard == 0:
            made["model.embed_tokens.weight"] = weights(rows // 8, dtype)
        made[f"model.norm_{shard}.weight"] = torch.ones(WIDTH, dtype=dtype)
        file = f"model-{shard + 1:05d}-of-00002.safetensors"
        save_file(made, folder / file)
        index |= dict.fromkeys(made, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def weights(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, WIDTH) * 0.02).to(dtype)


def plain(folder: Path) -> None:
    for tensor in tensors_of(folder):
        float(tensor.abs().max())


def fastest(folder: Path) -> None:
    for tensor in tensors_of(folder):
        [float(one) for one in tensor.aminmax()]


def tensors_of(folder: Path):
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield opened.get_tensor(name)


def seconds(action: Callable[[Path], object], folder: Path) -> float:
    began = time.perf_counter()
    action(folder)
    return time.perf_counter() - began


def measure(folder: Path, pairs: int) -> dict[str, list[float]]:
    actions = {"scan": scan, "plain": plain, "fastest": fastest}
    for action in actions.values():
        action(folder)
    took: dict[str, list[float]] = {name: [] for name in actions}
    for pair in range(pairs):
        order = list(actions.items())
        for name, action in order if pair % 2 else reversed(order):
            took[name].append(seconds(action, folder))
    return took


def peak_megabytes(threads: int, small: Path, folder: Path) -> float:
    command = [sys.executable, "-c", PEAK, str(threads), str(small), str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.manual_seed(0)
    slow = 0
    print(
        f"{'format':9} threads   scan GB/s  plain GB/s   ratio  quartiles   to aminmax   memory MiB"
    )
    with tempfile.TemporaryDirectory() as place:
        for dtype in FORMATS:
            name = str(dtype).removeprefix("torch.")
            folder = build(Path(place, name), dtype, options.megabytes)
            small = build(Path(place, f"{name}-small"), dtype, 48)
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
            for threads in options.threads:
                torch.set_num_threads(threads)
                took = measure(folder, options.pairs)
                pairs = zip(took["scan"], took["plain"], took["fastest"], strict=True)
                ratios, to_fastest = zip(*((p / s, f / s) for s, p, f in pairs), strict=True)
                low, middle, high = statistics.quantiles(ratios, n=4)
                slow += middle < BOUND
                rates = [size / statistics.median(took[each]) for each in ("scan", "plain")]
                memory = peak_megabytes(threads, small, folder)
                print(
                    f"{name:9} {threads:7} {rates[0]:11.2f} {rates[1]:11.2f} {middle:7.2f}  "
                    f"{low:.2f} {high:.2f} {statistics.median(to_fastest):12.2f} {memory:12.1f}",
                    flush=True,
                )
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
