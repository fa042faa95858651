"""LLaMA-Factory's own command under `nanstop run`: a healthy run is bitwise its own, a fault is
named and cured.
"""

import json
import os
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llamafactory") is None, reason="llamafactory is not installed"),
]
ROWS = [
    {"instruction": f"add {i} and {3 * i}", "input": "", "output": f"the sum is {4 * i}"}
    for i in range(64)
]
SETTINGS = {
    "stage": "sft",
    "do_train": True,
    "dataset": "sums",
    "template": "qwen",
    "cutoff_len": 128,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "seed": 0,
}
NORM = "model.norm"


@pytest.fixture
def folder(tmp_path):
    """A folder with an alpaca file, and a tiny Qwen2 with a tokenizer trained on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "rows.json"}}))
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner.train_from_iterator(
        map(json.dumps, ROWS),
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=words,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=words[0],
        eos_token=words[2],
        additional_special_tokens=[words[1]],
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    config = Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads, **ids)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def train(folder: Path, name: str, *, watched: bool, **settings):
    """Run ``llamafactory-cli train`` and return how it ended; its output is in ``folder/name``."""
    config = (
        folder / f"{name}.yaml"
    )  # JSON is YAML; of `.json` files LLaMA-Factory 0.9.5 reads none
    places = {
        "model_name_or_path": str(folder / "model"),
        "dataset_dir": str(folder),
        "output_dir": str(folder / name),
    }
    config.write_text(json.dumps(SETTINGS | places | settings))
    watch = ["-m", "nanstop", "run", "--out", str(folder / f"{name}-incidents")]
    command = [str(Path(sys.executable).with_name("llamafactory-cli")), "train", str(config)]
    return subprocess.run(
        ([sys.executable, *watch] if watched else []) + command,
        cwd=folder,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def summary(folder: Path, name: str):
    return json.loads((folder / f"{name}-incidents" / "summary.json").read_text())


def test_a_healthy_run_is_bitwise_its_own(folder):
    ended = [
        train(folder, name, watched=name == "watched", finetuning_type="full")
        for name in ("plain", "watched")
    ]
    assert [one.returncode for one in ended] == [0, 0], ended[-1].stderr[-3000:]
    plain, watched = (
        zlib.crc32((folder / name / "model.safetensors").read_bytes())
        for name in ("plain", "watched")
    )
    assert plain == watched
    told = summary(folder, "watched")
    assert (told["incidents"], told["findings"]) == ([], [])
    assert (told["steps"], told["exit"], told["ended"]) == (4, 0, "clean")


def test_an_overflow_in_half_weights_is_named_and_cured(folder):
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.model.norm.weight.fill_(6e4)
        model.lm_head.weight.mul_(1e-4)  # or the logits would be as large
    model.half().save_pretrained(folder / "model")
    settings = {"finetuning_type": "lora", "lora_rank": 4, "fp16": True}
    ended = train(folder, "bad", watched=True, **settings)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = summary(folder, "bad")
    (row,) = told["incidents"]
    assert (row["code"], row["phase"], row["step"], row["micro"]) == ("NS201", "forward", 0, 0)
    assert row["module"].endswith(NORM)
    assert "modeling_qwen2.py:" in row["source"]
    assert (row["verdict"], row["action"]) == ("proven", "adopt")
    assert told["steps"] == 4
    assert f"--> base_model.model.{NORM}" in ended.stderr
