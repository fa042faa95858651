"""Whatever hosts are handed as a session takes every call that the Protocol allows, and has all
that it names.
"""

import inspect
from pathlib import Path

import pytest
from torch import nn

from doubles.session import ScriptedSession
from loop_scripts import ReplayingSession
from nanstop.commands.lr_range.on_loop import LoopSweep
from nanstop.decide.policy import Policy
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.patch_table import Table
from nanstop.records import RunFacts
from nanstop.session.first_window import FirstWindow
from nanstop.session.off import OffSession
from nanstop.session.session import Session
from nanstop.session.watched_run import WatchedRun
from nanstop.store.incidents import Store

CLASSES = (Session, OffSession, FirstWindow, LoopSweep, ScriptedSession, ReplayingSession)
PUBLIC = [name for name in vars(WatchedRun) if not name.startswith("_")]
METHODS = [name for name in PUBLIC if inspect.isfunction(vars(WatchedRun)[name])]
VALUES = [*inspect.get_annotations(WatchedRun), *(name for name in PUBLIC if name not in METHODS)]


def calls(method):
    """(positional, keyword) arguments of the fullest and the scantest call that a signature
    takes.
    """
    parameters = list(inspect.signature(method).parameters.values())
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    for wanted in (named, [p for p in named if p.default is p.empty]):
        yield (
            [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD],
            {p.name: p.name for p in wanted if p.kind is p.KEYWORD_ONLY},
        )


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", METHODS)
def test_every_call_of_a_host_is_taken(kind, name):
    for positional, keyword in calls(getattr(WatchedRun, name)):
        signature = inspect.signature(getattr(kind, name))
        bound = signature.bind(*positional, **keyword)
        assert [bound.arguments[one] for one in positional] == positional


def test_a_session_leaves_nothing_to_the_protocol():
    assert [name for name in PUBLIC if name not in vars(Session)] == []


def made(kind, tmp_path):
    if kind is Session:
        view = PlainView(nn.Linear(1, 1), None)
        return Session(
            policy=Policy(), store=Store(tmp_path), view=view, facts=RunFacts(), announce=print
        )
    given = {FirstWindow: (print,), LoopSweep: (None, Path(), Table())}
    return kind(*given.get(kind, ()))


@pytest.mark.parametrize("kind", CLASSES)
def test_everything_a_host_reads_is_there(kind, tmp_path):
    session = made(kind, tmp_path)
    assert [name for name in VALUES if not hasattr(session, name)] == []
