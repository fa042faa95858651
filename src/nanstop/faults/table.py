"""The zoo: for every finding a planted fault, a healthy twin, and the sign that tells them apart without nanstop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from nanstop.diagnose.evidence.log_filter import filtered
from nanstop.diagnose.evidence.stacks import stacks
from nanstop.diagnose.findings.gradients.ns302_loss_scale_collapse import (
    HEALTHY_SKIPS,
    consecutive_falls,
)
from nanstop.faults import loading, plants, policies, precision, setups, training, updates
from nanstop.faults.specimen import Specimen, run_plain
from nanstop.records import ParamGroup, RunFacts

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Entry:
    """``sign(specimen)`` is True for the fault and False for the twin; it may train the specimen."""

    fault: Callable[[], Specimen]
    healthy: Callable[[], Specimen]
    sign: Callable[[Specimen], bool]


def loss_fails(specimen: Specimen) -> bool:
    """Return whether a loss is not finite."""
    return any(not math.isfinite(loss) for loss in run_plain(specimen).losses)


def gradient_fails(specimen: Specimen) -> bool:
    """Return whether a gradient is not finite although every loss is."""
    run = run_plain(specimen)
    return bool(run.bad_gradients) and all(math.isfinite(loss) for loss in run.losses)


def clipping_destroys(specimen: Specimen) -> bool:
    """Return whether clipping makes a gradient zero or NaN that was neither."""
    specimen.loss_fn(specimen.batches[0]).backward()
    gradients = [p.grad for p in specimen.model.parameters() if p.grad is not None]
    healthy = [g for g in gradients if bool(g.isfinite().all()) and bool(g.any())]
    torch.nn.utils.clip_grad_norm_(specimen.model.parameters(), specimen.clip or math.inf)
    return any(not bool(g.any()) or bool(g.isnan().any()) for g in healthy)


def update_breaks(specimen: Specimen) -> bool:
    """Return whether an update with finite gradients made a parameter non-finite."""
    return bool(run_plain(specimen).broken)


def raises_index_error(specimen: Specimen) -> bool:
    """Return whether the loss raises IndexError."""
    return run_plain(specimen).error.startswith("IndexError")


def child_is_killed(specimen: Specimen) -> bool:
    """Return whether a process is killed by SIGFPE."""
    return run_plain(specimen).error.endswith("killed by SIGFPE")


def child_hangs(specimen: Specimen) -> bool:
    """Return whether a process never comes to an end."""
    return "stood still" in run_plain(specimen).error


def memory_runs_out(specimen: Specimen) -> bool:
    """Return whether an allocation fails."""
    return "allocate memory" in run_plain(specimen).error


def is_bent(specimen: Specimen) -> bool:
    """Return whether the loss is finite and off the float64 one by more than 5 %."""
    batch = specimen.batches[0]
    seen = specimen.loss_fn(batch).item()
    specimen.model.double()  # autocast leaves float64 alone
    true = specimen.loss_fn({name: value.double() for name, value in batch.items()}).item()
    return math.isfinite(seen) and abs(seen - true) > 0.05 * abs(true)


def scale_collapses(specimen: Specimen) -> bool:
    """Return whether the scaler skips more steps in a row than a healthy start explains."""
    return consecutive_falls(run_plain(specimen).scales) > HEALTHY_SKIPS


def weight_is_bad(specimen: Specimen) -> bool:
    """Return whether a parameter is not finite before the first step."""
    return any(not bool(p.isfinite().all()) for p in specimen.model.parameters())


def has_huge_weight(specimen: Specimen) -> bool:
    """Return whether a parameter is finite and beyond 1e6."""
    ranges = [float(p.detach().abs().max()) for p in specimen.model.parameters()]
    return any(1e6 < largest < math.inf for largest in ranges)


def batch_is_bad(specimen: Specimen) -> bool:
    """Return whether a batch holds a value that is not finite."""
    return any(not bool(v.isfinite().all()) for batch in specimen.batches for v in batch.values())


def fails_once(specimen: Specimen) -> bool:
    """Return whether the same batch fails and then does not, with the same weights."""
    first, second = (specimen.loss_fn(specimen.batches[0]).item() for _ in range(2))
    return not math.isfinite(first) and math.isfinite(second)


def log_lies(specimen: Specimen) -> bool:
    """Return whether losses are not finite and transformers' log filter shows a finite number."""
    losses = run_plain(specimen).losses
    return any(map(math.isnan, losses)) and math.isfinite(filtered([[loss] for loss in losses]))


def zero_but_alive(specimen: Specimen) -> bool:
    """Return whether the loss is exactly 0 and its gradient is not."""
    run = run_plain(specimen)
    return run.healthy and run.losses[-1] == 0.0 and run.num_nonzero_gradients > 0


def narrow_for_its_family(specimen: Specimen) -> bool:
    """Return whether a model that was trained in bfloat16 is stored in float16."""
    declared = getattr(getattr(specimen.model, "config", None), "dtype", None)
    stored = {parameter.dtype for parameter in specimen.model.parameters()}
    return torch.float16 in stored and declared == torch.bfloat16


def trains_half(specimen: Specimen) -> bool:
    """Return whether a trainable parameter is stored in half precision."""
    return any(p.dtype in HALF for p in specimen.model.parameters() if p.requires_grad)


def stands_on_known_stack(specimen: Specimen) -> bool:
    """Return whether the machine and the formats of the weights are those of a published defect."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in specimen.model.parameters()}
    groups = tuple(
        ParamGroup(dtype=each, trainable=True, num_tensors=1, num_elements=1) for each in dtypes
    )
    facts, machine = RunFacts(param_groups=groups), specimen.environment
    return machine is not None and any(one.stands(machine, facts) for one in stacks())


def stands_still(specimen: Specimen) -> bool:
    """Return whether most weights are the same after an update although their gradients are not zero."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    num_moving = run_plain(specimen).num_nonzero_gradients
    moved = zip(specimen.model.parameters(), before, strict=True)
    return sum(int((p != old).sum()) for p, old in moved) < num_moving / 2


def positions_collide(specimen: Specimen) -> bool:
    """Return whether the model answers the same at two positions that have the same input."""
    (answer,) = specimen.model(specimen.batches[0]["x"])
    return answer.unique(dim=0).shape[0] < answer.shape[0]


def gradients_are_zero(specimen: Specimen) -> bool:
    """Return whether every gradient is exactly 0 and the loss is not."""
    run = run_plain(specimen)
    return run.num_nonzero_gradients == 0 and any(run.losses)


def has_no_units(specimen: Specimen) -> bool:
    """Return whether the weights are in bfloat16 on a machine whose GPU is older than Ampere."""
    stored = {parameter.dtype for parameter in specimen.model.parameters()}
    machine = specimen.environment
    old = machine is not None and machine.capability is not None and machine.capability < "8.0"
    return old and torch.bfloat16 in stored


def packed_alone(specimen: Specimen) -> bool:
    """Return whether weights are whole numbers and no adapter learns beside them."""
    parameters = dict(specimen.model.named_parameters())
    packed = any(not p.is_floating_point() for p in parameters.values())
    return packed and not any("lora_" in n and p.requires_grad for n, p in parameters.items())


def frozen_head(specimen: Specimen) -> bool:
    """Return whether a training leaves the score head as it was."""
    head = specimen.model.get_submodule("score").get_parameter("weight")
    before = head.detach().clone()
    run_plain(specimen)
    return torch.equal(before, head)


def moves_too_far(specimen: Specimen) -> bool:
    """Return whether the loss is ten times what it was after a few steps."""
    losses = run_plain(specimen).losses
    return losses[-1] > 10.0 * losses[0]


def learns_nothing(specimen: Specimen) -> bool:
    """Return whether a training leaves every weight as it was."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    run_plain(specimen)
    return all(map(torch.equal, before, specimen.model.parameters()))


def has_zero_rows(specimen: Specimen) -> bool:
    """Return whether the embedding has a row of zeros."""
    tables = (m for m in specimen.model.modules() if isinstance(m, torch.nn.Embedding))
    return any(bool((table.weight == 0.0).all(-1).any()) for table in tables)


def _pair(
    plant: Callable[..., Specimen], fault: object, healthy: object, sign: Callable[[Specimen], bool]
) -> Entry:
    return Entry(partial(plant, fault), partial(plant, healthy), sign)


ZOO: Mapping[str, Entry] = MappingProxyType(
    {
        "NS000": _pair(plants.hidden_write, math.nan, 0.5, gradient_fails),
        "NS101": _pair(
            plants.declared_bfloat16, torch.float16, torch.bfloat16, narrow_for_its_family
        ),
        "NS102": _pair(plants.half_trainables, torch.float16, torch.float32, trains_half),
        "NS103": _pair(plants.new_tokens, 0.0, None, has_zero_rows),
        "NS104": _pair(setups.on_v100, torch.bfloat16, torch.float32, has_no_units),
        "NS105": Entry(loading.unfilled_head, loading.head_from, has_huge_weight),
        "NS106": _pair(loading.merged, 16.0, 2.0, weight_is_bad),
        "NS107": _pair(setups.packed_base, 0, 2, packed_alone),
        "NS108": _pair(plants.on_h20, "12.1.3.1", "12.4.5.8", stands_on_known_stack),
        "NS109": _pair(setups.scored, "frozen", "trained", frozen_head),
        "NS110": _pair(precision.small_gradients, torch.float16, torch.float32, update_breaks),
        "NS111": _pair(precision.small_steps, torch.bfloat16, torch.float32, stands_still),
        "NS112": _pair(updates.half_loop, None, 65536.0, gradients_are_zero),
        "NS113": _pair(setups.adam_at, 1.0, 1e-3, moves_too_far),
        "NS114": _pair(setups.optimizer_of, "before", "after", learns_nothing),
        "NS115": _pair(updates.resumed_at, 0.0, 1.0, updates.moves_beyond_rate),
        "NS116": _pair(updates.updated, "in backward", "after backward", updates.moves_in_backward),
        "NS117": _pair(updates.split_batch, (2, 20), (11, 11), updates.depends_on_the_split),
        "NS201": _pair(plants.gated_product, 300.0, 3.0, loss_fails),
        "NS202": _pair(plants.masked_row, 0, 1, loss_fails),
        "NS203": _pair(training.added_masks, torch.add, torch.minimum, loss_fails),
        "NS204": _pair(plants.logarithm, -1.0, 0.5, loss_fails),
        "NS205": _pair(plants.kept_mean, 0, 3, loss_fails),
        "NS206": _pair(plants.unit_rows, 0.0, 0.5, loss_fails),
        "NS207": _pair(plants.log_ratio, 100.0, 10.0, loss_fails),
        "NS208": _pair(
            precision.counted_positions, torch.bfloat16, torch.float32, positions_collide
        ),
        "NS209": _pair(plants.normalisation, 300.0, 3.0, is_bent),
        "NS301": _pair(plants.summed_loss, 100.0, 1.0, gradient_fails),
        "NS302": _pair(plants.scaled_run, 300.0, 3.0, scale_collapses),
        "NS303": _pair(precision.weighted_loss, 1e-7, 1.0, gradients_are_zero),
        "NS304": _pair(plants.distance, 0.0, 0.5, gradient_fails),
        "NS305": _pair(training.clipped, 0.0, 0.5, clipping_destroys),
        "NS401": _pair(plants.loaded_weights, math.nan, 0.5, weight_is_bad),
        "NS402": _pair(plants.reward_head, torch.float16, torch.float32, update_breaks),
        "NS403": _pair(training.restored_moment, -1.0, 1e-4, update_breaks),
        "NS404": _pair(training.descent, 50.0, 1e-2, loss_fails),
        "NS501": _pair(plants.pixels, math.inf, 2.0, batch_is_bad),
        "NS502": _pair(plants.token_id, 20, 19, raises_index_error),
        "NS503": Entry(
            partial(plants.token_id, 19, label=-100),
            partial(plants.token_id, 19, label=3),
            loss_fails,
        ),
        "NS504": _pair(training.measured, 1e25, 1.0, loss_fails),
        "NS601": _pair(
            plants.child_process,
            "import signal; signal.raise_signal(signal.SIGFPE)",
            "import signal",
            child_is_killed,
        ),
        "NS602": _pair(plants.fused_attention, 7e18, 7.0, loss_fails),
        "NS603": _pair(plants.flaky, 1, 0, fails_once),
        "NS604": _pair(plants.large_buffer, 2**58, 4, memory_runs_out),
        "NS605": Entry(
            partial(plants.child_process, "import time; time.sleep(60)", limit=1.0),
            partial(plants.child_process, "import time; time.sleep(0)"),
            child_hangs,
        ),
        "NS606": _pair(training.overlapped, True, False, gradient_fails),
        "NS701": _pair(
            policies.rewarded, (1.0, 1.0, 1.0), (2.0, 1.0, 0.0), policies.nothing_differs
        ),
        "NS702": _pair(policies.against_reference, 100.0, 1.0, loss_fails),
        "NS703": _pair(policies.rolled_out, 0.6, 1.0, policies.ratio_is_off),
        "NS704": _pair(policies.rewarded, (1.0, math.inf, 0.0), (1.0, 0.5, 0.0), loss_fails),
        "NS801": Entry(
            partial(plants.reward_head, torch.float16, num_steps=6),
            partial(plants.reward_head, torch.float32, num_steps=6),
            log_lies,
        ),
        "NS802": _pair(plants.policy_gradient, 0.0, 0.1, zero_but_alive),
    }
)
