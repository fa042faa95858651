"""What the runner makes of logs, reports and saved files."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from nanstop.demo import runner, scenarios
from nanstop.demo.quiet import set_aside_broken
from nanstop.errors import NanstopError
from nanstop.records import RunFacts


def test_final_loss_is_the_mean_of_the_last_third():
    logs = [{"loss": loss, "grad_norm": 1.0} for loss in (9.0, 9.0, 9.0, 9.0, 2.0, 4.0)]
    assert runner.final_loss(logs) == 3.0
    assert runner.final_loss(logs[:1]) == 9.0


def test_final_loss_is_nan_where_the_gradients_were():
    logs = [{"loss": 1.0, "grad_norm": 1.0}, {"loss": 0.0, "grad_norm": math.nan}]
    assert math.isnan(runner.final_loss(logs))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_checkpoint_is_finite_only_if_it_exists_and_all_of_it_is(tmp_path, bad):
    assert not runner.checkpoint_is_finite(tmp_path)
    save_file({"a": torch.ones(3), "ids": torch.arange(3)}, tmp_path / "a.safetensors")
    assert runner.checkpoint_is_finite(tmp_path)
    save_file({"b": torch.tensor([1.0, bad])}, tmp_path / "b.safetensors")
    assert not runner.checkpoint_is_finite(tmp_path)


def test_the_falsified_log_is_decoded():
    facts = RunFacts(num_micro=32, logging_steps=25, nan_inf_filter=True)
    healthy = {"step": 25, "loss": 0.69, "grad_norm": 0.1}
    huge = {"step": 25, "loss": 13.0**32 * 0.672 / 25, "grad_norm": math.nan}
    assert runner._decoded(facts, [healthy]) == []
    (line,) = runner._decoded(facts, [huge])
    assert "1.19e+34" in line
    assert "0.672" in line


def test_unknown_names_are_errors_with_the_nearest():
    with pytest.raises(NanstopError, match=r"unknown scenario: `s1-gemma`"):
        scenarios.run_scenario("s1-gemma")
    with pytest.raises(NanstopError, match="did you mean `zero-rows`"):
        scenarios.run_scenario("s2-gemma-qlora-newtokens", variant="zero-row")


def test_log_lines_show_what_a_user_would_see():
    line = runner.log_line({"loss": 0.0, "grad_norm": math.nan, "epoch": 1.0, "step": 1})
    assert line == "{'step': 1, 'loss': 0, 'grad_norm': nan}"


def test_numbers_that_json_lacks_become_words():
    plain = runner._plain({"loss": math.nan, "step": 1, "lr": 0.5})
    assert plain == {"loss": "nan", "step": 1, "lr": 0.5}
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_what_a_package_logs_when_it_is_imported_is_not_shown(tmp_path, monkeypatch, caplog):
    (tmp_path / "talkative.py").write_text("import logging\nlogging.warning('no kernels')\n")
    monkeypatch.syspath_prepend(tmp_path)
    set_aside_broken("talkative")
    assert caplog.records == []
    assert sys.modules.pop("talkative").logging.root.manager.disable == 0


@pytest.mark.slow
def test_a_broken_package_counts_as_absent_and_a_missing_one_is_named(tmp_path):
    """peft and transformers import bitsandbytes where they find it;
    the second seed trains with it.
    """
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise RuntimeError('another CUDA')")
    script = (
        "from nanstop.demo.quiet import quiet\n"
        "for _ in range(2):\n"
        "    with quiet():\n"
        "        from transformers import Trainer\n"
        "from nanstop import cli\n"
        "cli.main(['demo', 's2-gemma-qlora-newtokens', '--variant', 'zero-rows'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr.count("bitsandbytes cannot be imported and counts as absent: another") == 1
    assert (
        "error[NS001]: s2-gemma-qlora-newtokens cannot import what it trains with" in ended.stderr
    )
    assert "bug in nanstop" not in ended.stderr
