"""Precision plans of planted models:
the regions found, agreement with float32, cost, trials and seconds.

Then pure bfloat16 weights at a learning rate that they cannot follow: the float32 loss of the
weights after training in float32, in bfloat16 as stored, and under the plan. Tiny models: half
precision on a CPU says nothing of speed.

    OMP_NUM_THREADS=1 python benchmarks/plan.py [--steps 400]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import nanstop
from nanstop.demo import tiny
from nanstop.demo.dpo import massive_gemma3

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import plan_models

THREE = (
    "model.layers.1.post_feedforward_layernorm",
    "model.layers.2.post_attention_layernorm",
    "model.layers.4.post_feedforward_layernorm",
)
CASES: dict[str, Callable[[], nn.Module]] = {
    "nothing planted": plan_models.qwen2,
    "one norm (S1)": massive_gemma3,
    "three norms": lambda: plan_models.massive(THREE),
    "gated product": lambda: plan_models.wide_product(plan_models.qwen2()),
    "gated product, half weights": lambda: plan_models.wide_product(plan_models.qwen2()).half(),
    "every projection": plan_models.everywhere,
}
LR = 1e-6


def row(name: str, model: nn.Module) -> str:
    """Return one line of the table."""
    plan = nanstop.plan(model, plan_models.batches()).record
    spent = plan.calibration
    assert spent is not None
    tail = f"{spent.trials:3d} trials {spent.seconds:5.1f} s"
    if plan.reason or plan.agreement is None or plan.cost is None:
        return f"{name:28} no fp16 plan: {plan.reason}\n{'':28} {tail}"
    regions = "; ".join(", ".join(region.modules) for region in plan.regions) or "none"
    found = plan.agreement
    return (
        f"{name:28} {regions}\n"
        f"{'':28} loss {found.loss_gap:.1e}  1-cos {1 - found.grad_cosine:.1e}  "
        f"updates {found.update_loss_gap:.1e}  headroom {found.headroom_bits:.1f} bits  "
        f"casts {plan.cost.casts:+d}  bytes {plan.cost.bytes:+d}  {tail}"
    )


def trained(steps: int, *, float32: bool = False, plan: object = None) -> float:
    """Return the float32 loss of the weights that a run from bfloat16 weights ends with."""
    (ids,) = plan_models.batches(num=1)

    def loss(model: nn.Module) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    model = tiny.qwen2().to(torch.bfloat16)
    model = model.float() if float32 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    folder = tempfile.mkdtemp(prefix="nanstop-plan-")
    with nanstop.watch(model, optimizer, out=folder, plan=plan, policy="observe") as watch:
        for _ in range(steps):
            watch.step(lambda _: loss(model), ids)
            watch.update()
        exact = tiny.qwen2()
        exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return float(loss(exact).detach())


def stagnation(steps: int) -> str:
    """Return what is left of the descent in bfloat16, without and with a plan."""
    (ids,) = plan_models.batches(num=1)
    plan = nanstop.plan(tiny.qwen2().to(torch.bfloat16), [ids], dtype="bf16", lr=LR)
    start, end = trained(0, float32=True), trained(steps, float32=True)
    stored, planned = trained(steps), trained(steps, plan=plan)
    return (
        f"{steps} steps at lr {LR:g} from bfloat16 weights, loss {start:.5f}\n"
        f"  float32   {end:.5f}\n"
        f"  as stored {stored:.5f}  {(start - stored) / (start - end):.1%} of the descent\n"
        f"  planned   {planned:.5f}  {(start - planned) / (start - end):.1%} of the descent\n"
        f"  because   {plan.record.trainables_reason}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, make in CASES.items():
        print(row(name, make()), flush=True)
    print(stagnation(given.steps))


if __name__ == "__main__":
    main()
