"""``nanstop plan``: a checkpoint folder, a script, and what a person may give wrong."""

import json

import pytest
import yaml

import nanstop
from nanstop import cli
from nanstop.demo import tiny
from nanstop.demo.dpo import PLANTED, massive_gemma3

LOOP = """
import torch
from nanstop.demo import tiny

model = tiny.qwen2(hidden_size=64, intermediate_size=128)
with torch.no_grad():
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight.mul_(3e5)
    mlp.down_proj.weight.mul_(1 / 3e5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    ids = torch.randint(3, 500, (2, 16), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


SCALED = LOOP.replace(
    "optimizer = torch", "scaler = torch.amp.GradScaler('cpu', init_scale=64.0)\noptimizer = torch"
).replace(
    "loss.backward()\n    optimizer.step()",
    "scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n"
    "    scaler.step(optimizer)\n    scaler.update()",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    massive_gemma3().save_pretrained(folder)
    return folder


def plan(*words):
    return cli.main(["plan", *map(str, words)])


def test_a_checkpoint_on_random_tokens(checkpoint, tmp_path, capsys):
    assert plan(checkpoint, "--dtype", "fp16", "--out", tmp_path / "plan.yaml") == cli.OK
    said = capsys.readouterr().out
    assert f"float32  {PLANTED}: a value of" in said
    assert "(random tokens: real ones may reach further)" in said
    saved = nanstop.load_plan(tmp_path / "plan.yaml")
    assert saved.record.modules == (PLANTED,)
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["dtype"] == "float16"


def test_token_ids_from_a_file(checkpoint, tmp_path, capsys):
    data = tmp_path / "ids.txt"
    data.write_text("5 6 7 8 9 10\n[11, 12, 13, 14]\n" + json.dumps({"input_ids": [3, 4, 5]}))
    assert plan(checkpoint, "--data", data, "--json") == cli.OK
    record = json.loads(capsys.readouterr().out)
    assert record["calibration"]["data"] == str(data)
    assert record["calibration"]["num_batches"] == 2
    assert [region["modules"] for region in record["regions"]] == [[PLANTED]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5 six", ":1: not a line of token ids"),
        ("5 9999", ":1: id 9999 is not in the vocabulary of 512"),
        ("5", "needs two ids at least"),
        ("", "holds no token ids"),
        ("[[1, 2]]", "not a line of token ids"),
    ],
)
def test_wrong_ids(checkpoint, tmp_path, capsys, line, message):
    (tmp_path / "ids.txt").write_text(line)
    assert plan(checkpoint, "--data", tmp_path / "ids.txt") == cli.USAGE
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter on the base beside it, neither with a tokenizer."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    tiny.qwen2().save_pretrained(folder / "base")
    model = get_peft_model(tiny.qwen2(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_is_planned_on_its_base(adapter, capsys):
    assert plan(adapter, "--json") == cli.OK
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == "PeftModel"
    assert record["agreement"]["headroom_at"].startswith("base_model.model.")


def test_an_adapter_without_its_base(adapter, tmp_path, capsys):
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/private"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert plan(tmp_path) == cli.USAGE
    assert "whose base `somebody/private` is no folder here" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text("{")
    assert plan(tmp_path) == cli.USAGE
    assert "peft cannot read its adapter" in capsys.readouterr().err


def t5(folder, **settings):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
    }
    T5ForConditionalGeneration(T5Config(**sizes, **settings)).save_pretrained(folder)


def test_an_encoder_with_its_decoder(tmp_path, capsys):
    t5(tmp_path, decoder_start_token_id=0)
    assert plan(tmp_path, "--json") == cli.OK
    assert json.loads(capsys.readouterr().out)["model"] == "T5ForConditionalGeneration"


def test_a_model_that_token_ids_alone_do_not_run(tmp_path, capsys):
    t5(tmp_path)
    assert plan(tmp_path) == cli.USAGE
    assert "cannot be run on token ids alone" in capsys.readouterr().err


def test_a_checkpoint_of_another_task(tmp_path, capsys):
    """A plan of a head drawn at random would say nothing."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    config = BertConfig(**sizes, num_attention_heads=2)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    assert plan(tmp_path) == cli.USAGE
    assert "tensors would be drawn at random, `cls." in capsys.readouterr().err


def test_files_that_are_no_script(checkpoint, tmp_path, capsys):
    for name in ("model.safetensors", "config.json"):
        assert plan(checkpoint / name) == cli.USAGE
        assert f"{name} is no script" in capsys.readouterr().err
    assert plan(tmp_path / "gone.safetensors") == cli.USAGE
    assert "no such" in capsys.readouterr().err
    assert plan(checkpoint, "--data", tmp_path / "gone.txt") == cli.USAGE
    assert "cannot read" in capsys.readouterr().err


def test_wrong_words(checkpoint, tmp_path, capsys):
    assert plan(checkpoint, "--dtype", "fp61") == cli.USAGE
    assert "did you mean `fp16`?" in capsys.readouterr().err
    assert plan(tmp_path) == cli.USAGE
    assert "no config.json" in capsys.readouterr().err
    assert plan(checkpoint, "more") == cli.USAGE
    assert "takes no arguments" in capsys.readouterr().err
    assert plan(tmp_path / "train.py", "--lr", "1e-5") == cli.USAGE
    assert "brings its own" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert plan(tmp_path) == cli.USAGE
    assert "transformers cannot build" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("text", [LOOP, SCALED], ids=["plain", "with a scaler"])
def test_a_script_is_planned_and_not_trained(tmp_path, capfd, text):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert plan(script, "--json") == cli.OK
    said = capfd.readouterr()
    record = json.loads(said.out)
    assert [region["modules"] for region in record["regions"]] == [["model.layers.1.mlp"]]
    assert record["calibration"]["lr"] == 1e-4
    assert "trained" not in said.err
