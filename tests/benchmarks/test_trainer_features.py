"""Every feature of transformers' Trainer, plain and watched;
``benchmarks/trainer_features.py`` writes the table.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import trainer_features as features

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the host's own features

CASES = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.slow else [])
    for one in features.FEATURES
]


@pytest.mark.parametrize("feature", CASES)
def test_a_watched_trainer_leaves_what_a_plain_one_leaves(tmp_path, feature):
    result = features.play(feature, tmp_path)
    if result.missing:
        pytest.skip(result.missing)
    assert result.differences == ()
    assert result.compared >= 9


def test_the_comparison_sees_one_changed_draw_and_one_changed_file(tmp_path):
    def touched(run, settings):
        trainer = run.make(settings)
        trainer.train()
        if run.incidents is not None:
            torch.rand(())
            trainer.state.log_history[0]["loss"] += 1e-9
            state = run.folder / "checkpoint-1" / "scheduler.pt"
            torch.save(torch.load(state) | {"last_epoch": 7}, state)
            (run.folder / "checkpoint-1" / "more.json").write_text("nanstop")

    feature = features.Feature("touched", {"max_steps": 1} | features.STEPS, touched)
    found = {Path(name).name for name in features.play(feature, tmp_path).differences}
    assert found == {"rng", "log", "scheduler.pt", "more.json"}
