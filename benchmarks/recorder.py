"""What an investigation of one micro-batch costs: recorder and localization against a plain replay.

Qwen2, 6 layers of 384, batch 4 x 128, on CPU. Interleaved pairs: each ratio is taken within one
pair, so that a busy machine slows both sides; the median over the pairs is printed with its
quartiles. Bounds: recorder 4x, localization 8x.

    python benchmarks/recorder.py [--pairs N] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nanstop.localize.localize import localize
from nanstop.tracing.record_step import record

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from fnstep import FnStep


def build(kernel: str, damage: Callable[[Qwen2ForCausalLM], None]) -> FnStep:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=kernel)
    damage(model)
    ids = torch.randint(3, 1024, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    return FnStep(model, lambda m, b: m(**b).loss, [batch])


def healthy(model: Qwen2ForCausalLM) -> None:
    pass


def bad_parameter(model: Qwen2ForCausalLM) -> None:
    model.model.layers[3].mlp.up_proj.weight.data[0, 0] = float("nan")


def overflow(model: Qwen2ForCausalLM) -> None:
    mlp = model.model.layers[3].mlp
    mlp.up_proj.weight.data.mul_(1e25)
    mlp.gate_proj.weight.data.mul_(1e25)


def overflow_everywhere(model: Qwen2ForCausalLM) -> None:
    """Every layer overflows on its own: the most that confirmation has to do."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.mul_(1e25)
        layer.mlp.gate_proj.weight.data.mul_(1e25)


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def ratios(step: FnStep, action: Callable[[], object], pairs: int) -> list[float]:
    def plain() -> None:
        with step.isolated():
            step.run(0)

    plain()
    action()
    found = []
    for _ in range(pairs):
        base = seconds(plain)
        found.append(seconds(action) / base)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for kernel in ("sdpa", "eager"):
        step = build(kernel, healthy)
        rows.append(
            (f"recorder, {kernel}", 4.0, ratios(step, lambda s=step: record(s, 0), options.pairs))
        )
        for damage in (healthy, bad_parameter, overflow, overflow_everywhere):
            step = build(kernel, damage)
            name = f"localize, {kernel}, {damage.__name__.replace('_', ' ')}"
            rows.append((name, 8.0, ratios(step, lambda s=step: localize(s, 0), options.pairs)))
    print(f"{'times a plain replay':45s} median   quartiles     bound")
    for name, bound, found in rows:
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{name:45s} {middle:5.2f}x   {low:5.2f} {high:5.2f}   {bound:.0f}x")
    return int(any(statistics.median(found) > bound for _, bound, found in rows))


if __name__ == "__main__":
    sys.exit(main())
