"""TRL's own command under `nanstop run`: a healthy run is bitwise its own, a fault is named and
cured.
"""

import json
import sys
import zlib
from pathlib import Path

import pytest

import tiny
from e2e.scripts import run

pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("trl")
TRL = (str(PROGRAM),) if PROGRAM.is_file() else ("-m", "trl.cli.main")
"""The program is Python, so that the interpreter can run it, too."""
SETTINGS = {
    "per_device_train_batch_size": 2,
    "max_steps": 4,
    "max_length": 32,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "seed": 0,
    "use_cpu": True,
    "bf16": False,
    "dtype": "float32",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a tiny Llama, its tokenizer and a data set of texts."""
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    texts = [" ".join(f"w{(row * word) % 60}" for word in range(1, 13)) for row in range(32)]
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("".join(f"{json.dumps({'text': one})}\n" for one in texts))
    return tmp_path


def sft(folder, name, *, watched, **settings):
    """Run ``trl sft`` with a YAML file; its model is in ``folder/name``."""
    places = {"model_name_or_path": "model", "dataset_name": "rows", "output_dir": name}
    config = folder / f"{name}.yaml"
    lines = (SETTINGS | places | settings).items()
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines))
    command = (*TRL, "sft", "--config", config.name)
    return run(folder, *command, watched=watched, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def digest(folder, name):
    return zlib.crc32((folder / name / "model.safetensors").read_bytes())


def test_a_healthy_run_is_bitwise_its_own(folder):
    watched = sft(folder, "watched", watched=True)
    assert watched.code == 0, watched.err[-3000:]
    told = watched.summary
    assert (told["incidents"], told["findings"]) == ([], [])
    assert (told["steps"], told["exit"]) == (4, 0)
    plain = sft(folder, "plain", watched=False)
    assert plain.code == 0, plain.err[-3000:]
    assert digest(folder, "plain") == digest(folder, "watched")


def test_a_fault_in_its_config_is_named_and_cured(folder):
    ended = sft(folder, "half", watched=True, dtype="float16", max_steps=6)
    assert ended.code == 0, ended.err[-3000:]
    codes = {row["code"] for row in (*ended.rows, *ended.summary["findings"])}
    assert codes & {"NS102", "NS402"}, ended.err[-3000:]
    assert ended.summary["steps"] == 6
