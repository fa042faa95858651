"""What each of several ranks does that cannot meet any more."""

import pytest

from nanstop.decide.apart import decide_apart
from nanstop.decide.policy import Policy
from nanstop.decide.remembered import PolicyState
from nanstop.records import FailureKey

NEW = PolicyState()
KEY = FailureKey(kind="nan", phase="forward")


def does(by_itself="skip", state=NEW, on_failure="repair", **at):
    given = {"at_step": 40, "optimizer": 1, "can_veto": True}
    given |= {"weights_broken": False, "harmless": False}
    policy = Policy(on_failure=on_failure)
    return decide_apart(policy, state, by_itself, key=KEY, **given | at)


@pytest.mark.parametrize(
    ("by_itself", "on_failure", "at", "kind"),
    [
        ("skip", "repair", {}, "skip"),
        ("skip", "skip", {}, "skip"),
        ("skip", "stop", {}, "stop"),
        ("skip", "observe", {}, "observe"),
        ("skip", "repair", {"can_veto": False}, "observe"),
        ("skip", "repair", {"harmless": True}, "continue"),
        ("skip", "repair", {"weights_broken": True}, "stop"),
        ("stop", "repair", {}, "stop"),
        ("stop", "skip", {}, "stop"),
        ("stop", "observe", {}, "observe"),
    ],
)
def test_what_is_done(by_itself, on_failure, at, kind):
    action, _ = does(by_itself, on_failure=on_failure, **at)
    assert action.kind == kind
    assert action.atoms == ()


def test_too_many_updates_in_a_row_end_the_run():
    state = NEW
    for _ in range(Policy().max_skips_in_a_row):
        action, state = does(state=state)
        assert action.kind == "skip"
        assert "cannot agree" in action.reason
    assert does(state=state)[0].kind == "stop"


def test_why_it_ends():
    assert "would ruin" in does("stop")[0].reason
    assert "not finite" in does("stop", weights_broken=True)[0].reason
