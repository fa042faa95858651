"""Sessions are opened by adapters, when a run's model and optimizer exist; this says with what."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nanstop.decide.policy import OnFailure, OnStop, Policy
from nanstop.records import PrecisionPlan, RunFacts
from nanstop.store.incidents import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanstop.replay.step import ModelView
    from nanstop.session.session import Announce, Session

    OpenSession = Callable[[ModelView, RunFacts], Session]

_INJECTED = "nanstop.process.inject.pythonpath.sitecustomize"
"""What Python imports first in every process that is watched."""

FOLDER = ".nanstop"
SERIES_VARIABLE = "NANSTOP_SERIES"
"""Set to 1, the first rank writes its losses, norms and rates of the whole run when it ends."""


def incident_folder(out: str | os.PathLike[str] | None = None) -> Path:
    """Return where incidents go: ``out``, else ``$NANSTOP_DIR``, else ``.nanstop``."""
    return Path(out or os.environ.get("NANSTOP_DIR") or FOLDER)


def run_store(out: str | os.PathLike[str] | None = None) -> Store:
    """Return the store of this run, begun anew unless ``nanstop run`` has begun it in a process above."""
    run_id = os.environ.get("NANSTOP_RUN")
    first_rank = os.environ.get("RANK", "0") in ("", "0")
    keeps_series = os.environ.get(SERIES_VARIABLE) == "1" and first_rank
    store = Store(incident_folder(out), run_id, keeps_series=keeps_series)
    if run_id is None:
        store.reset()
    return store


def switched_off(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether ``NANSTOP=off`` is set."""
    given = os.environ if environment is None else environment
    return given.get("NANSTOP", "").lower() in ("off", "0", "false")


def injection() -> Path:
    """Return the folder that holds nothing but the ``sitecustomize.py`` that is injected."""
    spec = find_spec(_INJECTED)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def watching(policy: Policy, folder: Path, run_id: str, python_path: str = "") -> dict[str, str]:
    """Return the environment variables under which every Python process below is watched."""
    return {
        "PYTHONPATH": os.pathsep.join(part for part in (str(injection()), python_path) if part),
        "NANSTOP_RUN": run_id,
        "NANSTOP_DIR": str(folder),
        "NANSTOP_ON_FAILURE": policy.on_failure,
        "NANSTOP_ON_STOP": policy.on_stop,
        "NANSTOP_ALLOW": ",".join(policy.allow),
        "NANSTOP_BUDGET_SECONDS": str(policy.budget_seconds),
    }


def watched_policy(environment: Mapping[str, str]) -> Policy:
    """Return the policy that ``watching`` wrote down."""
    allow = tuple(name for name in environment.get("NANSTOP_ALLOW", "").split(",") if name)
    word = cast("OnFailure", environment.get("NANSTOP_ON_FAILURE", "repair"))  # Policy checks it
    on_stop = cast("OnStop", environment.get("NANSTOP_ON_STOP", "raise"))
    seconds = float(environment.get("NANSTOP_BUDGET_SECONDS", Policy().budget_seconds))
    return Policy(on_failure=word, on_stop=on_stop, allow=allow, budget_seconds=seconds)


def opener(
    policy: Policy,
    store: Store,
    announce: Announce,
    *,
    plan: PrecisionPlan | None = None,
    opened: Callable[[Session], None] = lambda _: None,
) -> OpenSession:
    """Return what adapters call to open a session. ``opened`` is told of each training. Torch is imported by then.

    ``plan``: what a session is to put in force when it is told to prepare.
    """

    def open_session(view: ModelView, facts: RunFacts) -> Session:
        from nanstop.session.session import Session

        session = Session(
            policy=policy, store=store, view=view, facts=facts, announce=announce, plan=plan
        )
        session.opened = opened
        return session

    return open_session
