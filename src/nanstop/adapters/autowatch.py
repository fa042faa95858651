"""Watches whatever a script trains with, without a call of nanstop in it. The only global state of nanstop is here.

What is replaced stands in one table: ``transformers.Trainer.train`` and, for raw loops, a few functions of torch (see
``raw_loop``). ``unwatch`` puts everything back.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from nanstop.adapters.table import Table

OpenSession = Callable[[Any, Any], Any]
"""Called with (view, facts) when training is about to begin; returns a session."""

_log = logging.getLogger("nanstop")
_table = Table()
_open_session: OpenSession | None = None
_loops: Any = None


def install(open_session: OpenSession) -> None:
    """Watch trainers and loops from here on, as far as torch and transformers are imported.

    Called again after another import it adds what that import makes possible; ``open_session`` stays the first.
    """
    global _open_session, _loops  # noqa: PLW0603  (the one place for it)
    if _open_session is None:
        _open_session = open_session
        atexit.register(_finish)
    if _loops is None and "torch" in sys.modules:
        from nanstop.adapters.raw_loop import RawLoops

        _loops = RawLoops(_open_session, _table)
        _loops.install()
    if "transformers.trainer" in sys.modules:
        _table.replace(sys.modules["transformers.trainer"].Trainer, "train", _train)


def start() -> None:
    """Install as the environment says that ``nanstop run`` has set for its children."""
    install(_open_session or _opener())


def _opener() -> OpenSession:
    """Return an opener that reads the environment, and imports what a session needs, when training begins."""

    def open_session(view: Any, facts: Any) -> Any:
        from nanstop.run.announce import announcer
        from nanstop.run.launch import watched_policy
        from nanstop.run.opening import incident_folder, opener
        from nanstop.run.store import Store

        store = Store(incident_folder(), os.environ.get("NANSTOP_RUN"))
        return opener(watched_policy(os.environ), store, announcer(store.folder))(view, facts)

    return open_session


def unwatch() -> None:
    """Put every replaced function back and finish what is being watched; without ``install`` before, do nothing."""
    global _open_session, _loops  # noqa: PLW0603
    _table.undo()
    if _loops is not None:
        _loops.end()
    if _open_session is not None:
        atexit.unregister(_finish)
        _finish()
    _open_session = _loops = None


@contextmanager
def paused() -> Iterator[None]:
    """Leave raw loops alone inside: another watch owns what is being trained."""
    with ExitStack() as scope:
        if _loops is not None:
            scope.enter_context(_loops.pause())
        yield


def _train(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``transformers.Trainer.train``: this trainer is watched while it trains."""
    own = vars(trainer)
    with paused(), ExitStack() as scope:
        if "train" in own:  # the script watches this trainer itself
            return original(trainer, *args, **kwargs)
        # The watch takes over the train() that it finds: a subclass's, through which the call came, must not run twice.
        own["train"] = partial(original, trainer)
        scope.callback(own.pop, "train", None)
        try:
            from nanstop.adapters.hf import watch_trainer

            scope.callback(watch_trainer(trainer, _open_session).close)
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("this trainer is not watched (%s: %s)", type(error).__name__, error)
        return trainer.train(*args, **kwargs)


def _finish() -> None:
    """Finish the session of raw loops; the exit code of a script that calls ``sys.exit`` is its parent's to know."""
    if _loops is not None:
        _loops.guard.finish(1 if getattr(sys, "last_value", None) is not None else 0)
