"""Guards are judged by what their absence changes:
from trials as literals, without any training.
"""

import pytest

from nanstop.commands.doctor.doctor import Audit, due, guards_seen, harmed, judge
from nanstop.commands.doctor.result import INJECTED, Guard, GuardTrial
from nanstop.commands.doctor.text import reaching, render

HARM = {"bad_weights": 10, "bad_state": 20, "bad_gradients": 10}


def audited(stack, host="Trainer", lines=()):
    """Run every trial that is due on a stack:
    ``stack(injected, present)`` returns fields of its ``GuardTrial``.
    """
    guards = tuple(Guard(name=name, kind=kind) for name, kind in stack.guards)
    trials = []
    while plans := due(guards_seen(guards, trials), trials):
        for plan in plans:
            names = [guard.name for guard in guards_seen(guards, trials)]
            present = {name for name in (*names, *lines) if name not in plan.removed}
            fields = stack(plan.injected, present)
            trials.append(GuardTrial(injected=plan.injected, removed=plan.removed, **fields))
    return judge(Audit(host=host, guards=guards, trials=tuple(trials)))


def acts(found):
    return {row.guard.name: row.acts for row in found.guards}


def stack(*guards):
    def made(trial):
        trial.guards = guards
        return trial

    return made


NOTHING = ("does nothing",) * 5


def test_a_log_filter_hides():
    @stack(("filter", "log_filter"))
    def trial(injected, present):
        return HARM | {"bad_logs": () if "filter" in present else ("2:loss",)}

    found = audited(trial)
    assert acts(found) == {"filter": ("hides",) * 5, "Trainer": NOTHING}
    assert found.num_reaching == 5
    assert reaching(found) == "5 of 5 injected failures reach the weights"


def test_clipping_makes_a_gradient_worse_and_stops_an_overflow_of_the_norm():
    @stack(("clip", "clip"))
    def trial(injected, present):
        if injected == "norm_overflow":
            return {} if "clip" in present else {"bad_state": 5}
        if "clip" in present:
            return {"bad_weights": 1, "bad_gradients": 1, "zero_gradients": 9}
        return {"bad_weights": 1, "bad_gradients": 1}

    found = audited(trial)
    assert acts(found)["clip"] == (*("makes it worse",) * 4, "stops the write")
    assert found.failures[4].stopped_by == ("clip",)
    assert found.num_reaching == 4


def test_two_guards_that_would_each_do_are_both_seen():
    @stack(("scaler", "scaler"), ("callback A", "callback"), ("filter", "log_filter"))
    def trial(injected, present):
        return {} if present & {"scaler", "callback A"} else HARM

    found = audited(trial)
    assert acts(found)["scaler"] == acts(found)["callback A"] == ("stops the write",) * 5
    assert acts(found)["filter"] == acts(found)["Trainer"] == NOTHING
    assert found.failures[0].stopped_by == ("scaler", "callback A")
    assert found.num_reaching == 0
    assert reaching(found) == "none of 5 injected failures reach the weights"


def test_a_callback_that_stops_too_late_and_one_that_only_speaks():
    @stack(("late", "callback"), ("loud", "callback"))
    def trial(injected, present):
        said = ("loss is nan!",) if "loud" in present else ()
        return HARM | {"ended": "stopped" if "late" in present else "went on", "said": said}

    found = audited(trial)
    assert acts(found)["late"] == ("stops after the write",) * 5
    assert acts(found)["loud"] == ("only logs",) * 5
    assert found.failures[0].outcome == "10 weights are not finite, then training stops"


def test_a_guard_that_does_harm_by_itself():
    @stack(("norm for the log", "clip"))
    def trial(injected, present):
        return HARM if "norm for the log" in present else {}

    assert acts(audited(trial))["norm for the log"] == ("makes it worse",) * 5


def test_lines_become_guards_of_the_failures_that_they_read():
    @stack()
    def trial(injected, present):
        if injected != "nan_loss":
            return HARM
        raised = {"lines": ("train.py:7",), "ended": "raised"}
        return raised if "train.py:7" in present else HARM

    found = audited(trial, host="the loop", lines=("train.py:7",))
    assert acts(found)["train.py:7"] == ("stops the write", *NOTHING[1:])
    assert acts(found)["the loop"] == NOTHING
    assert found.failures[0].outcome == "kept from the weights, training raises"
    assert found.num_reaching == 4


def test_what_the_host_does_by_itself():
    @stack()
    def trial(injected, present):
        return HARM | {"ended": "raised"} if injected == "nan_loss" else {}

    found = audited(trial)
    assert acts(found) == {"Trainer": ("stops after the write", *("stops the write",) * 4)}


def test_a_failure_that_could_not_be_planted():
    @stack(("clip", "clip"))
    def trial(injected, present):
        return {"took": injected not in ("nan_loss", "inf_loss")} | HARM

    found = audited(trial)
    assert acts(found)["clip"][:2] == ("not tried", "not tried")
    assert reaching(found) == "3 of 3 injected failures reach the weights"


@pytest.mark.parametrize("growth", [1e4, float("inf"), float("nan")])
def test_weights_thrown_away_count_as_harm(growth):
    assert harmed(GuardTrial(injected="norm_overflow", growth=growth))
    assert not harmed(GuardTrial(injected="norm_overflow", growth=2.0))


def test_the_text_names_every_failure_and_every_guard():
    @stack(("log filter", "log_filter"))
    def trial(injected, present):
        return HARM

    text = render(audited(trial))
    assert text.splitlines()[0] == "guards of Trainer, observed in 10 short trainings"
    assert "  NaN loss                                REACHES THE WEIGHTS: 10 weights" in text
    assert "    does nothing           every one" in text
    assert len(INJECTED) == 5
