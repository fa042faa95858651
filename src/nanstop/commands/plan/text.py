"""A precision plan in words."""

from __future__ import annotations

from collections.abc import Iterator

from nanstop.records import Agreement, Calibration, PlanCost, PrecisionPlan
from nanstop.store.plan_file import headline
from nanstop.wording import counted


def render(plan: PrecisionPlan) -> str:
    """Return a plan with what it was measured on, how it agrees with float32 and what it costs."""
    lines = list(headline(plan))
    if plan.scaler is not None:
        lines.append(f"  loss scale from {plan.scaler.init_scale:g}")
    if plan.agreement is not None:
        lines += _agreement(plan.agreement)
    if plan.cost is not None:
        lines.append(_cost(plan.cost))
    if plan.calibration is not None:
        lines.append(_calibration(plan.calibration))
    return "\n".join(lines)


def _agreement(found: Agreement) -> Iterator[str]:
    bound = f" of {found.update_loss_bound:.1e} allowed" if found.update_loss_bound > 1e-3 else ""
    yield (
        f"  = against float32: loss {found.loss_gap:.1e}, gradient cosine {found.grad_cosine:.6f}; "
        f"{found.num_updates} updates: loss {found.update_loss_gap:.1e}{bound}, "
        f"{found.update_share:.1%} of the descent"
    )
    where = f" at `{found.headroom_at}`" if found.headroom_at else ""
    yield (
        f"  = least headroom {found.headroom_bits:.1f} bits{where}; "
        f"{found.matmul_share:.0%} of the matrix products stay narrow"
    )


def _cost(cost: PlanCost) -> str:
    return f"  = the regions add {cost.casts:+d} casts and {cost.bytes / 2**10:+.1f} KiB to a step"


def _calibration(found: Calibration) -> str:
    data = f" ({found.data})" if found.data else ""
    tokens = f", {found.num_tokens} tokens in all" if found.num_tokens else ""
    padded = " and a copy of one with padded rows" if found.num_padded else ""
    early = "" if found.complete else "; the time was up: fewer regions may do"
    batches, trials = counted(found.num_batches, "batch"), counted(found.trials, "trial")
    return (
        f"  = calibrated on {batches}{tokens}{data}{padded}{_unseen(found)}; "
        f"{trials}, {found.seconds:.1f} s{early}"
    )


def _unseen(found: Calibration) -> str:
    if not found.num_unseen:
        return ", no other to hold out" if found.num_batches == 1 else ""
    num_all = found.num_batches + found.num_padded
    return f", {found.num_unseen} of the {num_all} held out of the search"
