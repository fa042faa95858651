"""Evidence for and against the findings of masks, clipping, optimizer state, divergence, odd
samples and ranks.
"""

import math
from dataclasses import replace

from diagnose.evidence import (
    bad_gradients,
    batch_fact,
    climbing,
    event,
    evidence,
    half_head,
    localization,
    series,
    stats,
    sum_of_masks,
)
from nanstop.records import (
    Evidence,
    OptimizerFacts,
    Position,
    Replay,
    RunFacts,
    Series,
    Signal,
    StateFault,
    StepId,
)

CLEAN = Replay(incident="0001", fidelity="not_reproduced", runs=2)
LOSS_AT_0, LOSS_AT_1 = (
    Signal(source="loss", value=math.nan, at=StepId(run="r", step=3, micro=m)) for m in (0, 1)
)

NAN_ROWS = event(op="aten._softmax.default", dtype="float32", bad={"nan": 9}, fully_masked_rows=3)
OVERFLOW = localization(event(wider="finite"))
_OPERANDS = (stats("float32"),) * 3
EXPLODED = localization(
    event(op="aten.addmm.default", dtype="float32", wider="finite", inputs=_OPERANDS)
)
HEAVY = (stats("float32", absmax=1e9, name="w"),)
UNDEFINED = localization(event(dtype="float32", wider="nonfinite", bad={"nan": 1}))
FAR_APART = (stats("float32", absmax=1e10),)
KEPT_BY_A_KERNEL = localization(
    event(phase="backward", dtype="float32", wider="nonfinite", bad={"nan": 1}, inputs=FAR_APART)
)
UNDEFINED_BACKWARD = localization(
    event(phase="backward", dtype="float32", wider="nonfinite", bad={"nan": 1})
)
LOSSES, GRADIENT_NORMS = (5.0, 9e7, 5e29), (4.0, 1e16, math.inf)
NARROW_LOSSES, NARROW_NORMS = (2.0, 2.1, 2.0, 30.0, 900.0), (1.0, 1.0, 1.0, 9.0, 90.0)

AWAY = (3.6, 8.7, 60.0, 740.0, 1.2e4, 2.3e5, 1.8e6, 8e6, 3.5e7)
UPWARDS = (3.7, 6.6, 23.0, 82.0, 420.0, 1500.0, 3600.0, 7500.0, 1.2e4)


def running(losses, norms, rates=()):
    """A run that has not failed, by its losses, gradient norms and rates."""
    named = {"loss_raw": losses, "grad_norm": norms, "lr": rates}
    series = tuple(
        Series(name=name, steps=tuple(range(len(values))), values=tuple(map(float, values)))
        for name, values in named.items()
    )
    return Evidence(facts=RunFacts(host="loop"), series=series)


SQRT = event(phase="backward", dtype="float32", wider="nonfinite", forward_op="aten.sqrt.default")
ONE_SPOILED = localization(SQRT, reaches=("w",))
INFINITELY_SPOILED = replace(ONE_SPOILED, key=replace(ONE_SPOILED.key, kind="+inf"))
CLIPPED = RunFacts(clip=1.0)

SQRT_OF_STATE = event(
    op="aten._foreach_sqrt.default",
    phase="optimizer",
    dtype="float32",
    wider="nonfinite",
    bad={"nan": 1},
    inputs=(stats("float32", name="state exp_avg_sq of w"),),
)
FAULT = StateFault(name="w:exp_avg_sq", kind="negative", num_bad=1)
RESTORED = RunFacts(optimizer=OptimizerFacts(name="AdamW", state_faults=(FAULT,)))
UPDATE = event(phase="optimizer", module="", op="aten.addcdiv_.default")

FAR = batch_fact("x", "float32", maximum=1e25, outlier_row=1, outlier_ratio=1e24)
IN_SAMPLE = replace(EXPLODED, positions=(Position(sample=1),))
TWO_RANKS = RunFacts(world_size=2)


def evaluating(losses, norms):
    """Evidence of an update that evaluates its closure: of two steps before, and of its own."""
    history = (
        series("loss_raw", (3000.0, 1e-5, *losses, math.inf), (1, 2, 3, *(3 for _ in losses))),
        series("grad_norm", (8e4, 0.07, *norms, math.inf), (1, 2, 3, *(3 for _ in norms))),
    )
    return evidence(EXPLODED, RunFacts(sinks=("closure",)), series=history)


def masked(*masks, nan_rows=NAN_ROWS):
    return evidence(localization(nan_rows, masks=masks))


def broken_by(culprit):
    return evidence(localization(event(phase="optimizer"), "from_state", culprit=culprit))


def far_micro(size, micro):
    """The facts of a micro-batch of one sample."""
    return replace(batch_fact("x", "float32", micro=micro, maximum=size), shape=(1, 8))


def reduced(**fields):
    """Two ranks, a bad gradient, and a clean replay."""
    settings = {"facts": TWO_RANKS, "signals": (bad_gradients(3),), "replay": CLEAN}
    return evidence(**(settings | fields))


FIRES = [
    ("NS203", masked(sum_of_masks()), "certain"),
    ("NS203", masked(sum_of_masks(op="aten.mul.Tensor", scalars=(-1e9,))), "certain"),
    ("NS203", masked(sum_of_masks(fully_masked_rows=1)), "likely"),
    ("NS305", evidence(ONE_SPOILED, signals=(bad_gradients(5),)), "certain"),
    ("NS305", evidence(ONE_SPOILED, RunFacts(num_micro=4), signals=(bad_gradients(5),)), "likely"),
    ("NS305", evidence(signals=(bad_gradients(1, num_zero=4, norm=math.inf),)), "likely"),
    ("NS305", evidence(INFINITELY_SPOILED, CLIPPED, signals=(bad_gradients(1, num_zero=4),)), "likely"),
    ("NS305", evidence(ONE_SPOILED, CLIPPED, signals=(bad_gradients(1, num_inf=1),)), "certain"),
    ("NS403", Evidence(facts=RESTORED), "certain"),
    ("NS403", evidence(facts=RESTORED, bad_params=("w",)), "likely"),
    ("NS403", evidence(localization(SQRT_OF_STATE)), "certain"),
    ("NS403", broken_by("state exp_avg of w"), "certain"),
    ("NS404", climbing(LOSSES, GRADIENT_NORMS, EXPLODED), "likely"),
    ("NS404", climbing(LOSSES, (), EXPLODED), "likely"),
    ("NS404", climbing((5.0, 10.8, 60.0, 24143.0, 4e12, 2e37), (), EXPLODED), "likely"),
    ("NS404", climbing((4.2, 111.7, 1.5e6), (1.3, 988.0), EXPLODED), "likely"),
    ("NS404", climbing((4.2, 111.7, 1.5e6), (1.3, 988.0), KEPT_BY_A_KERNEL), "likely"),
    ("NS404", climbing((5.0, 9e7), (4.0, 1e16), EXPLODED), "possible"),
    ("NS404", climbing((5.0, 9e7), (4.0, 1e16), EXPLODED, odd_weights=HEAVY), "likely"),
    ("NS404", climbing((5.0, 9e7), (4.0, 1e16), OVERFLOW, odd_weights=HEAVY), "likely"),
    ("NS404", climbing((5.0,), (4.0,), EXPLODED, odd_weights=HEAVY), "possible"),
    ("NS404", climbing((5.0, 5.1), (4.0, 4.1), EXPLODED, odd_weights=HEAVY), "possible"),
    ("NS404", climbing((5.0, 5.1, 4.9, 5.0, 5e6), (1.0, 1.0, 1.0, 1.0, 1e6), EXPLODED, odd_weights=HEAVY), "possible"),
    ("NS404", climbing(NARROW_LOSSES, NARROW_NORMS, OVERFLOW), "possible"),
    ("NS404", evaluating((2302.0, 2299.0, 1.2e9, 2.4e5, 2.8e15), (8.6e4, 8.6e4, 4.9e9, 2.6e6, 1.6e15)), "likely"),
    ("NS404", running(AWAY, UPWARDS), "likely"),
    ("NS404", running((2.0, 1.9, 2.1, 2.0, *AWAY), (3.0, 2.5, 3.1, 2.9, *UPWARDS)), "likely"),
    ("NS404", running([1.5, -20.0, *(-3e13 * (2 + step % 3) for step in range(8))], ()), "likely"),
    ("NS404", running([-3e13 * 2**step for step in range(9)], ()), "likely"),
    ("NS404", climbing((*NARROW_LOSSES, 3000.0), (*NARROW_NORMS, 400.0), OVERFLOW), "likely"),
    ("NS504", evidence(IN_SAMPLE, batch=[FAR]), "likely"),
    ("NS504", evidence(EXPLODED, batch=[far_micro(s, m) for m, s in enumerate((1.0, 1e20, 2.0))]), "possible"),
    ("NS606", reduced(), "possible"),
]  # fmt: skip

SILENT = [
    ("NS203", masked()),
    ("NS203", masked(sum_of_masks(), sum_of_masks(op="aten.log.default", wider="nonfinite"))),
    ("NS203", masked(sum_of_masks(bad={"posinf": 1}))),
    ("NS203", masked(sum_of_masks(), nan_rows=event())),
    ("NS305", evidence(ONE_SPOILED, signals=(bad_gradients(1, num_inf=1),))),
    ("NS305", evidence(replace(ONE_SPOILED, reaches=("v", "w")), CLIPPED, signals=(bad_gradients(2, num_total=2),))),
    ("NS305", evidence(facts=CLIPPED, signals=(bad_gradients(1),))),
    ("NS305", evidence(signals=(bad_gradients(1, num_zero=4, num_inf=1),))),
    ("NS305", evidence(ONE_SPOILED, signals=(bad_gradients(1, num_zero=4),))),
    ("NS305", evidence(INFINITELY_SPOILED, signals=(bad_gradients(1, num_zero=4),))),
    ("NS305", evidence(signals=(bad_gradients(1, num_zero=1, num_total=2),))),
    ("NS305", evidence(ONE_SPOILED, signals=(LOSS_AT_0, bad_gradients(5)))),
    ("NS403", Evidence(facts=half_head())),
    ("NS403", evidence(localization(event()), RESTORED)),
    ("NS403", broken_by("state gradient of w")),
    ("NS403", evidence(localization(UPDATE))),
    ("NS404", climbing((5.0, 5.1, 4.9, 5.0), (1.0, 1.0, 1.0, 1.0), EXPLODED)),
    ("NS404", climbing((5.0, 5.1, 4.9, 5.0, 5e9), (1.0, 1.0, 1.0, 1.0, 1e9), EXPLODED)),
    ("NS404", climbing((2.3, 2.2, 2.1, 2.4), (1.0, 1.2, 0.9, 1.0), OVERFLOW)),
    ("NS404", climbing((1e-8, 1e-3, 0.5), (0.0, 0.0, 0.4), EXPLODED)),
    ("NS404", evaluating((2302.0, 2299.0, 2.4e5, 2290.0), (8.6e4, 8.6e4, 2.6e6, 8.5e4))),
    ("NS404", evaluating((0.7, 1.1, 0.6, 31.0), (1.0, 1.0, 1.0, 40.0))),  # other losses, say
    ("NS404", evaluating((2.0, 9e4, 4e9), ())),  # of micro-batches
    ("NS404", running(AWAY[:6], UPWARDS[:6])),
    ("NS404", running(AWAY, [2.0] * 9)),  # a loss that is scaled up, say
    ("NS404", running([-value for value in AWAY], UPWARDS)),  # a critic's has no bound below
    ("NS404", running([*(-3e13 for _ in range(7)), -2.0], ())),
    ("NS404", running([-3e18 * (2 + step % 3) for step in range(9)], ())),  # of large rewards
    ("NS404", running([-1e13] * 9, (), rates=[1e-5 * 2**step for step in range(9)])),
    ("NS404", running((*AWAY, 90.0), (*UPWARDS, 30.0))),
    ("NS404", running([9.0, 1e3, 90.0, 1e4, 900.0, 1e5, 9e3, 1e6, 9e4, 1e7], [*UPWARDS, 9e6])),
    ("NS404", running([1e7 + step for step in range(9)], UPWARDS)),
    ("NS404", running(AWAY, UPWARDS, rates=[1e-5 * 2**step for step in range(9)])),
    ("NS404", climbing(LOSSES, GRADIENT_NORMS, UNDEFINED)),
    ("NS404", climbing(LOSSES, GRADIENT_NORMS, UNDEFINED_BACKWARD)),
    ("NS404", climbing((5.0,), (1.0,), EXPLODED)),
    ("NS404", climbing((5.0, 5.1, 4.9), (1.0, 1.0, 1.0), EXPLODED, odd_weights=HEAVY)),
    ("NS404", climbing((5.0, 9e4), (4.0, 1e4), EXPLODED, RunFacts(odd_weights=HEAVY), odd_weights=HEAVY)),
    ("NS504", evidence(IN_SAMPLE, batch=[replace(FAR, outlier_row=0)])),
    ("NS504", evidence(IN_SAMPLE, batch=[replace(FAR, outlier_ratio=3.0)])),
    ("NS504", evidence(localization(UPDATE, positions=(Position(sample=1),)), batch=[FAR])),
    ("NS504", evidence(IN_SAMPLE, RunFacts(num_micro=2), batch=[FAR], signals=(LOSS_AT_0, LOSS_AT_1))),
    ("NS504", evidence(EXPLODED, batch=[far_micro(s, m) for m, s in enumerate((1.0, 9.0, 2.0))])),
    ("NS603", reduced()),
    ("NS606", reduced(facts=RunFacts())),
    ("NS606", evidence(facts=TWO_RANKS, replay=CLEAN)),
    ("NS606", reduced(found=ONE_SPOILED)),
]  # fmt: skip
