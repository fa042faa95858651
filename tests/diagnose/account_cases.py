"""What becomes of gradients between a backward and an update, as evidence for the rules."""

import math

from nanstop.records import (
    Contribution,
    Evidence,
    GradientAccount,
    RunFacts,
    SourceLine,
    StepId,
)

LINE = SourceLine(file="train.py", line=3, function="f", text="p = p - lr * p.grad")
LATER = {"at": StepId(run="r", step=17)}
OWN = {"is_own": True}
"""Of a script that makes its updates by itself."""


def accounts(*given, given_by=({},), clip=None, told=(), **fields):
    """Evidence of an account for each of ``given``, at updates 1, 2, ...; the run clips to
    ``clip``, and ``told`` is known of it.

    ``given_by``: fields of the contributions of each of them.
    """
    settings = {"optimizer": "SGD", "num_elements": 100, "arrived": 2.0, "consumed": 2.0}
    settings |= {"factor": 1.0, "was_read": False}
    contributions = tuple(Contribution(**({"norm": 1.0} | one)) for one in given_by)
    made = tuple(
        GradientAccount(
            **settings | {"at": StepId(run="r", step=step)} | fields | one,
            contributions=contributions,
        )
        for step, one in enumerate(given, start=1)
    )
    return Evidence(
        facts=RunFacts(host="loop", clip=clip), accounts=made, at=made[-1].at, told=told
    )


def clipped_scaled(*, norms):
    """Gradients are made smaller before they are unscaled, at each update by another factor."""
    seen = [
        {"until_unscale": factor, "norm_at_unscale": norm}
        for factor, norm in zip((0.1, 0.2), norms, strict=True)
    ]
    return accounts(*seen, scale=1024.0, factor=1e-4)


LOST = {"is_lost": True}
APART = {"loss_factor": 64.0, "is_scaled_apart": True}
"""The backward alone gets 64 times the loss that the script holds."""

FIRES = [
    ("NS306", accounts({}, {}, is_carried=True), "certain"),
    ("NS306", accounts({}, {}, given_by=(LOST, LOST, {})), "certain"),
    ("NS306", accounts({}, {}, given_by=({}, {"is_again": True})), "certain"),
    ("NS306", accounts({}, {}, num_hidden=3, factor=None), "certain"),
    ("NS307", accounts({}, {}, {}, clip=0.0, consumed=0.0, factor=0.0), "certain"),
    ("NS307", accounts({}, {}, {}, arrived=1e20, consumed=0.0, factor=0.0), "likely"),
    ("NS307", accounts({}, {}, {}, clip=0.0, consumed=0.0, told=("NS105",)), "certain"),
    ("NS307", accounts({}, {}, {}, norm=math.inf, clip=1.0, consumed=0.0), "certain"),
    ("NS307", accounts(*[{}] * 5, LATER, consumed=0.0, factor=0.0), "likely"),
    ("NS307", accounts(*[{}] * 5, LATER, consumed=1e-9, factor=5e-10), "likely"),
    ("NS112", accounts({}, {}, scale=1024.0), "certain"),
    ("NS112", clipped_scaled(norms=(1.0, 1.0)), "certain"),
    ("NS307", accounts({}, {}, is_put_back=True), "certain"),
    ("NS307", accounts({"updated_at": (LINE,)}, num_asked=40), "certain"),
    ("NS307", accounts({}, {}, {}, elsewhere_at=(LINE,), **OWN), "likely"),
    ("NS113", accounts({}, {}, {}, {}, {}, asked=0.0, **OWN), "likely"),
    ("NS113", accounts({"share_moved": 1.0}, {}, {}, asked=0.0, **OWN), "likely"),
    ("NS113", accounts({}, {}, {}, {}, shrunk=0.4), "likely"),
    ("NS113", accounts({}, {}, {}, {}, shrunk=10.0), "likely"),
    ("NS111", accounts({}, {}, {}, asked=1e-5, share_lost=0.97, **OWN), "certain"),
    ("NS114", accounts(*[{}] * 6, num_still=1, **OWN), "likely"),
    ("NS114", accounts({}, {}, {}, num_with_gradient=0, arrived=0.0), "likely"),
    ("NS114", accounts(*[{}] * 9, num_with_gradient=0, arrived=0.0, is_only=False), "likely"),
    ("NS112", accounts({}, {}, {}, rate=0.1, **APART), "likely"),
    ("NS114", accounts({}, {}, {}, num_at_the_end=2), "likely"),
    ("NS110", accounts({}, {}, share_squares_lost=0.5, squares_lost_at=(LINE,), **OWN), "likely"),
    ("NS115", accounts({}, num_states_moved=2, states_at=(LINE, LINE), **OWN), "likely"),
]  # fmt: skip

SILENT = [
    ("NS306", accounts({"is_carried": True}, {})),
    ("NS306", accounts({}, {}, given_by=({}, {}, {}))),
    ("NS306", accounts({}, {}, given_by=(LOST, LOST, {}), was_read=True)),
    ("NS306", accounts({}, {}, given_by=(LOST, LOST, {}), was_read=None)),
    ("NS306", accounts({}, {}, given_by=(LOST, LOST, {}), is_only=False)),
    ("NS306", accounts({}, {}, given_by=(LOST, LOST, {}), were_weights_still=False)),
    ("NS306", accounts({}, {}, given_by=(LOST, LOST, {}), factor=None)),
    ("NS306", accounts({}, {}, given_by=(LOST | {"num_bad": 1}, {}))),
    ("NS306", accounts({}, {}, given_by=(LOST, {"reached_others": True}))),
    ("NS306", accounts({}, {}, given_by=({}, {"is_again": True, "is_lost": True}, {}))),
    ("NS307", accounts({}, {}, {}, {}, {}, consumed=0.0, factor=0.0)),
    ("NS307", accounts(*[{}] * 6, consumed=0.0, factor=0.0)),
    ("NS307", accounts({}, {}, {"norm": 1.0}, norm=math.inf, clip=1.0, consumed=0.0)),
    ("NS307", accounts({}, {}, {}, arrived=1e20, consumed=0.0, factor=0.0, told=("NS105",))),
    ("NS307", accounts({}, {}, {}, arrived=1e20, consumed=0.0, factor=0.0, told=("NS702",))),
    ("NS307", accounts({}, {}, {}, arrived=1e3, consumed=0.0, factor=0.0)),
    ("NS307", accounts({}, {}, {}, arrived=0.0, consumed=0.0, factor=None)),
    ("NS307", accounts({}, {}, {}, arrived=math.inf, consumed=0.0, factor=None)),
    ("NS307", accounts({}, {}, {}, scale=2.0**24, arrived=2.0**24, consumed=0.5)),
    ("NS112", accounts({}, {}, scale=1024.0, factor=1 / 1024)),
    ("NS112", accounts({}, {}, scale=1024.0, until_unscale=0.25, norm_at_unscale=1.0, factor=1e-4)),
    ("NS112", clipped_scaled(norms=(1.0, 2.0))),
    ("NS307", accounts({"is_put_back": True}, {})),
    ("NS307", accounts({}, {}, {}, **OWN)),
    ("NS307", accounts({}, {}, {"share_moved": 1.0}, elsewhere_at=(LINE,), **OWN)),
    ("NS113", accounts({}, {}, {}, {}, asked=0.0, **OWN)),
    ("NS113", accounts({}, {}, {}, {}, {}, asked=None, **OWN)),
    ("NS113", accounts({}, {}, {}, shrunk=0.4)),
    ("NS113", accounts({"shrunk": 0.0}, {}, {}, {}, shrunk=0.4)),
    ("NS111", accounts({}, {}, {}, asked=1e-5, share_lost=0.9, **OWN)),
    ("NS111", accounts({}, {}, {}, asked=0.0, share_lost=1.0, **OWN)),
    ("NS114", accounts(*[{}] * 5, num_still=1, **OWN)),
    ("NS114", accounts(*[{}] * 5, {"num_still": 0}, num_still=1, **OWN)),
    ("NS114", accounts({}, {}, num_with_gradient=0, arrived=0.0)),
    ("NS114", accounts({}, {}, {}, num_with_gradient=0)),
    ("NS114", accounts(*[{}] * 5, num_with_gradient=0, arrived=0.0, is_only=False)),
    ("NS114", accounts({}, {}, {"num_with_gradient": 1}, num_with_gradient=0, arrived=0.0)),
    ("NS112", accounts({}, {}, {}, **APART)),
    ("NS112", accounts({}, {}, {}, rate=1.0, **APART)),
    ("NS112", accounts({}, {}, {}, rate=0.1, factor=1 / 64, **APART)),
    ("NS112", accounts({"loss_factor": 32.0}, {}, {}, rate=0.1, **APART)),
    ("NS114", accounts({}, {"num_at_the_end": 0}, {}, num_at_the_end=2)),
    ("NS110", accounts({"share_squares_lost": 0.0}, {}, share_squares_lost=0.5, **OWN)),
    ("NS115", accounts({}, num_states_moved=1, **OWN)),
]  # fmt: skip
