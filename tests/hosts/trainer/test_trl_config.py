"""Config files of ``trl`` read by TRL's own parser:
facts, keys that nobody knows, values that TRL refuses.
"""

import json
import os

import pytest

from nanstop.commands.check.check import check_config
from nanstop.errors import NanstopError
from nanstop.hosts.trainer.trl_config import read_config

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")

BASE = "model_name_or_path: model\ndataset_name: data\noutput_dir: out\n"
DPO = f"{BASE}precompute_ref_log_probs: false\n"
REWARD = f"{BASE}center_rewards_coefficient: 0.01\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write a config beside a saved model of Gemma 3's type and return its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    saved = {"model_type": "gemma3", "text_config": {"dtype": "bfloat16"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(saved))

    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def codes(path):
    return [one.code for one in check_config(path).findings]


def test_facts_come_from_the_file_and_the_saved_config(config):
    seen = check_config(config(f"{DPO}learning_rate: 5.0e-6\nuse_peft: true\nbeta: 0.2\n"))
    facts = seen.facts
    assert (facts.host, facts.model_type, facts.declared_dtype) == ("trl dpo", "gemma3", "bfloat16")
    assert (facts.optimizer.name, facts.optimizer.lr, facts.clip) == ("AdamW", 5e-6, 1.0)
    assert facts.precision.requested == "bfloat16"
    assert (facts.adapter.task_type, facts.objective.beta) == ("CAUSAL_LM", 0.2)
    assert "fit trl dpo, kto: read as that of `trl dpo`" in seen.failures[0]
    assert seen.findings == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{DPO}fp16: true\nuse_peft: true\n", ["NS101"]),
        (f"{DPO}beta: 0.0\n", ["NS113"]),
        (f"{DPO}max_steps: 10\nwarmup_steps: 20\n", ["NS113"]),
        (f"{DPO}load_in_4bit: true\nuse_peft: false\n", ["NS107"]),
        (f"{DPO}load_in_4bit: true\nuse_peft: true\ndtype: bfloat16\n", []),
        (f"{REWARD}use_peft: true\n", ["NS109"]),
        (f"{REWARD}use_peft: true\nlora_task_type: SEQ_CLS\n", []),
        (f"{REWARD}use_peft: true\nlora_modules_to_save: [score]\n", ["NS109"]),
        (f"{BASE}reward_funcs: [accuracy_reward]\nnum_generations: 8\n", []),
        (BASE, []),
        (f"{BASE}num_processes: 2\naccelerate_config: single_gpu\n", []),
    ],
)
def test_findings(config, text, found):
    assert codes(config(text)) == found


def test_keys_of_several_commands_claim_no_objective(config):
    seen = check_config(config(f"{BASE}beta: 0.0\n"))
    assert seen.facts.objective is None
    assert "its keys fit trl dpo, grpo" in seen.failures[0]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (f"{DPO}\nlearnin_rate: 1\n", "dpo.*line 6: `learnin_rate`", "`learning_rate`"),
        (
            f"{DPO}base: &b\n  learnin_rate: 1\n<<: *b\n",
            "line 6: `learnin_rate`",
            "`learning_rate`",
        ),
        ("- a\n- b\n", "a config is a mapping", ""),
        ("a: [1\n", "not readable", ""),
        ("{model_type: llama, hidden_size: 32}", "a model, not a training", "as its folder"),
        (f"{DPO}learning_rate: fast\n", "invalid float value", ""),
        (f"{DPO}fp16: true\nbf16: true\n", "(?i)bf16", ""),
    ],
)
def test_what_cannot_be_read(config, text, message, hint):
    with pytest.raises(NanstopError, match=message) as raised:
        read_config(config(text))
    assert hint in raised.value.hint


def test_the_environment_is_left_alone(config):
    read_config(config(f"{DPO}env:\n  SOME_SETTING: 1\n"))
    assert "SOME_SETTING" not in os.environ
