"""Histories of a run's numbers: what is kept of a trainer's logs, and how much."""

import math

from nanstop.session.history import WHOLE, History


def names(history):
    return {series.name: series.values for series in history.records()}


def test_of_a_log_the_metrics_of_the_objective_are_kept():
    history = History()
    entry = {"loss": 0.5, "learning_rate": 1e-3, "epoch": 0.1, "rewards/chosen": 0.25, "kl": 1}
    history.log(10, entry | {"reward": None, "reward_note": "text"})
    found = names(history)
    assert set(found) == {"rewards/chosen", "kl", "reward"}
    assert found["kl"] == (1.0,)
    assert math.isnan(found["reward"][0])


def test_metrics_without_end_take_no_memory_without_end():
    history = History()
    for step in range(100):
        history.log(step, {f"rewards/{step}": 1.0, "kl": 0.0})
        history.add("loss_raw", step, 1.0)
    found = names(history)
    assert len([name for name in found if name.startswith("rewards/")]) == 63
    assert len(found["kl"]) == 64
    assert len(found["loss_raw"]) == 100


def test_a_whole_run_keeps_its_metrics_whole():
    history = History(WHOLE)
    for step in range(100):
        history.log(step, {"kl": 0.0})
    assert len(names(history)["kl"]) == 100


def test_the_values_of_a_window_that_is_run_again_are_taken_back():
    """Two optimizers that take turns number their updates alike:
    the step does not say whose value it is.
    """
    history = History()
    for loss in (1.0, 2.0, float("nan")):
        history.add("loss_raw", 5, loss)
    history.add("grad_norm", 5, float("nan"))
    history.take_back("loss_raw", 1)
    history.take_back("grad_norm", 2)
    history.take_back("lr", 1)
    assert names(history) == {"loss_raw": (1.0, 2.0), "grad_norm": ()}
