"""Sessions are opened by hosts, when a run's model and optimizer exist; this says with what."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nanstop.decide.policy import Policy
from nanstop.ranks import is_first, num_launched
from nanstop.records import PrecisionPlan, RunFacts
from nanstop.store.incidents import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanstop.replay.step import ModelView
    from nanstop.session.session import Announce, Session
    from nanstop.session.watched_run import OpenSession


FOLDER = ".nanstop"
_OFF, _ON = ("off", "0", "false"), ("", "on", "1", "true")
_log = logging.getLogger("nanstop")
SERIES_VARIABLE = "NANSTOP_SERIES"
"""Set to 1, the first rank writes its losses, norms and rates of the whole run when it ends."""


def incident_folder(out: str | os.PathLike[str] | None = None) -> Path:
    """Return where incidents go: ``out``, else ``$NANSTOP_DIR``, else ``.nanstop``."""
    return Path(out or os.environ.get("NANSTOP_DIR") or FOLDER).expanduser()


def run_store(out: str | os.PathLike[str] | None = None) -> Store:
    """Return the store of this run, begun anew unless ``nanstop run`` has begun it in a process
    above, or the first of several ranks does.
    """
    begun = os.environ.get("NANSTOP_RUN")
    run_id = begun or ("ranks" if num_launched() > 1 else None)
    keeps_series = os.environ.get(SERIES_VARIABLE) == "1" and is_first()
    store = Store(incident_folder(out), run_id, keeps_series=keeps_series)
    if begun is None and is_first():
        store.reset()
    return store


def switched_off(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether ``NANSTOP=off`` is set; a word that says neither off nor on is warned of."""
    given = os.environ if environment is None else environment
    word = given.get("NANSTOP", "")
    if word.lower() not in (*_OFF, *_ON):
        _log.warning("nanstop: NANSTOP=%s is not understood and ignored; `off` switches off", word)
    return word.lower() in _OFF


def opener(
    policy: Policy,
    store: Store,
    announce: Announce,
    *,
    plan: PrecisionPlan | None = None,
    opened: Callable[[Session], None] = lambda _: None,
) -> OpenSession:
    """Return what hosts call to open a session. ``opened`` is told of each training.
    Torch is imported by then.

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
