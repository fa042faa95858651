"""What becomes of gradients between their backward and the update is told by what is there."""

import pytest
import torch

from hosts.script.account_scripts import FAULTS, HEALTHY, loop
from loop_scripts import run_script, same, weights, with_findings
from nanstop.measure.accounts.gradient_accounts import GradientAccounts

torch.set_num_threads(1)
ACCOUNTED = ("NS306", "NS307", "NS112", "NS114", "NS117")


def accounted(folder, source):
    """Run a script as ``nanstop run`` does; return its variables and what gradients came to."""
    ending, found = with_findings(folder, source)
    return ending, [one for one in found if one.code in ACCOUNTED]


@pytest.mark.parametrize(("code", "line", "source"), FAULTS.values(), ids=FAULTS)
def test_fault_is_named_with_its_line(tmp_path, code, line, source):
    _, found = accounted(tmp_path, source)
    assert [one.code for one in found] == [code], found
    if line:
        assert line in found[0].lines[0]
        assert found[0].where.startswith("script.py:")
        assert found[0].seen.step <= 4


def test_an_update_that_leaves_no_gradient_to_those_after_it_does_not_hide_when_it_is_clipped(
    tmp_path,
):
    named = "clipped after updates, of which those that come later have nothing to clip"
    _, (found,) = accounted(tmp_path, FAULTS[named][2])
    assert found.title == "gradients are clipped after the update"


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY)
def test_healthy_loop_is_left_in_peace(tmp_path, source):
    _, found = accounted(tmp_path, source)
    assert found == []


@pytest.mark.parametrize(
    "name",
    [
        "cleared in the window in place",
        "clipped by hand while scaled",
        "NaN replaced by the second of three hooks",
        "NaN replaced behind the accumulation",
    ],
)
def test_lines_are_looked_for_without_changing_a_bit(tmp_path, name):
    source = FAULTS[name][2]
    plain = run_script(tmp_path / "plain.py", source)
    seen, _ = accounted(tmp_path, source)
    assert same(weights(plain), weights(seen))
    assert torch.equal(plain["torch"].get_rng_state(), seen["torch"].get_rng_state())


def test_hooks_stand_as_they_stood_also_after_a_backward_that_raises(tmp_path):
    source = loop(
        """
        opt.zero_grad()
        try:
            loss_of(x).backward()
        except ValueError:
            continue
        opt.step()
        """,
        before="""
        def refuse(g):
            if len(calls) == 0:
                calls.append(g)
                raise ValueError("not now")


        calls = []
        hooks = [refuse, lambda g: None]
        for hook in hooks:
            net[0].weight.register_hook(hook)
        """,
    )
    ending, found = accounted(tmp_path, source)
    assert found == []
    assert list(ending["net"][0].weight._backward_hooks.values()) == ending["hooks"]


def test_lines_are_looked_for_only_where_an_account_does_not_balance(tmp_path, monkeypatch):
    asked = []
    watched_by = GradientAccounts.watched

    def watched(self, *, only_weights):
        asked.extend([self] * (not only_weights))
        return watched_by(self, only_weights=only_weights)

    monkeypatch.setattr(GradientAccounts, "watched", watched)
    accounted(tmp_path, HEALTHY["plain"])
    assert not asked
    accounted(tmp_path, FAULTS["cleared in the window"][2])
    assert asked


def test_a_script_with_a_function_mode_of_its_own_keeps_it(tmp_path):
    own = """
        from torch.utils._device import DeviceContext as Mode
        """
    body = """
        with Mode(torch.device("cpu")):
            for x in window:
                opt.zero_grad()
                (loss_of(x) / 4).backward()
            opt.step()
        """
    source = loop(body, before=own, windows=True)
    plain = run_script(tmp_path / "plain.py", source)
    seen, _ = accounted(tmp_path, source)
    assert same(weights(plain), weights(seen))
