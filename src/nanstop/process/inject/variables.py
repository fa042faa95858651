"""What the parent of a watched process sets in its environment, and how the child reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from nanstop.decide.policy import OnFailure, OnStop, Policy


DRY_RUN = "NANSTOP_DRY"
"""A ``DryRun`` as JSON; set, a script's first training becomes the job."""

INJECTION = Path(__file__).with_name("pythonpath")
"""The folder that holds nothing but ``sitecustomize.py``."""


def watching(policy: Policy, folder: Path, run_id: str, python_path: str = "") -> dict[str, str]:
    """Return the environment variables under which every Python process below is watched."""
    return {
        "PYTHONPATH": os.pathsep.join(part for part in (str(INJECTION), python_path) if part),
        "NANSTOP_RUN": run_id,
        "NANSTOP_DIR": str(folder),
        "NANSTOP_ON_FAILURE": policy.on_failure,
        "NANSTOP_ON_STOP": policy.on_stop,
        "NANSTOP_ALLOW": ",".join(policy.allow),
        "NANSTOP_BUDGET_SECONDS": str(policy.budget_seconds),
        "NANSTOP_QUIET": "1" if policy.quiet else "",
        "NANSTOP_SHOW_TEXT": "1" if policy.show_text else "",
        "NANSTOP_AUDIT_DEVICES": str(policy.audit_devices),
    }


def watched_policy(environment: Mapping[str, str]) -> Policy:
    """Return the policy that ``watching`` wrote down."""
    from nanstop.decide.policy import Policy

    allow = tuple(name for name in environment.get("NANSTOP_ALLOW", "").split(",") if name)
    word = cast("OnFailure", environment.get("NANSTOP_ON_FAILURE", "repair"))  # Policy checks it
    on_stop = cast("OnStop", environment.get("NANSTOP_ON_STOP", "raise"))
    seconds = float(environment.get("NANSTOP_BUDGET_SECONDS", Policy().budget_seconds))
    return Policy(
        on_failure=word,
        on_stop=on_stop,
        allow=allow,
        budget_seconds=seconds,
        quiet=environment.get("NANSTOP_QUIET") == "1",
        show_text=environment.get("NANSTOP_SHOW_TEXT") == "1",
        audit_devices=int(environment.get("NANSTOP_AUDIT_DEVICES") or 0),
    )
