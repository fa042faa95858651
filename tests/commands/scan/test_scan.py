"""``nanstop scan`` on real checkpoints of tiny models, and on files that are none."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanstop import cli
from nanstop.commands.scan.scan import findings, scan
from nanstop.errors import NanstopError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A saved causal LM of four layers, untied, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def changed(llama, tmp_path):
    """A copy of the model whose tensors went through a function:
    ``changed(edit)`` returns the folder.
    """

    def make(edit, **config):
        tensors = load_file(llama / "model.safetensors")
        save_file(edit(tensors) or tensors, tmp_path / "model.safetensors", {"format": "pt"})
        known = json.loads((llama / "config.json").read_text()) | config
        (tmp_path / "config.json").write_text(json.dumps(known))
        return tmp_path

    return make


def codes(folder):
    return [finding.code for finding in findings(scan(folder))]


def problems(folder):
    return {(problem.kind, problem.name) for problem in scan(folder).keys}


def test_a_sound_model_has_no_findings(llama):
    found = scan(llama)
    assert findings(found) == ()
    assert (found.architecture, found.declared_dtype) == ("LlamaForCausalLM", "bfloat16")
    assert found.tied is False
    assert found.keys == found.duplicates == ()
    assert {tensor.stats.dtype for tensor in found.tensors} == {"bfloat16"}
    assert len(found.token_rows) == 2


def test_one_nan_is_found_and_placed(changed):
    def edit(tensors):
        tensors["model.layers.2.mlp.up_proj.weight"][7, 5] = math.nan
        tensors["model.norm.weight"][0] = -math.inf

    folder = changed(edit)
    [finding] = findings(scan(folder))
    assert finding.code == "NS106"
    assert any("up_proj" in line and "NaN x 1; first at [7, 5]" in line for line in finding.lines)
    assert any("-Inf x 1" in line for line in finding.lines)


def test_zero_and_far_rows_are_ns103_and_padding_is_not(changed):
    def edit(tensors):
        tensors["model.embed_tokens.weight"][[3, 60]] = 0.0
        tensors["lm_head.weight"][9] *= 100.0

    folder = changed(edit, pad_token_id=3)
    embedding, head = sorted(
        scan(folder).token_rows, key=lambda rows: rows.parameter == "lm_head.weight"
    )
    assert (embedding.zero_rows, head.outlier_rows) == ((60,), (9,))
    assert codes(folder) == ["NS103"]


def test_tied_by_content(changed):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    found = scan(changed(edit))
    assert found.duplicates == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert found.tied is True


def test_fresh_norms_are_no_duplicates(llama):
    norms = [t for t in scan(llama).tensors if "norm" in t.name]
    assert len(norms) > 2
    assert scan(llama).duplicates == ()


@pytest.mark.parametrize(
    ("lost", "problem"),
    [
        ("lm_head.weight", ("missing", "lm_head.weight")),
        ("model.layers.2.mlp.up_proj.weight", ("missing", "model.layers.2.mlp.up_proj.weight")),
        ("model.layers.3.", ("missing", "model.layers.3")),
        ("model.layers.1.", ("missing", "model.layers.1")),
    ],
)
def test_missing_keys_are_ns105(changed, lost, problem):
    folder = changed(lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(lost)})
    assert problems(folder) == {problem}
    assert codes(folder) == ["NS105"]


def test_a_head_that_the_config_does_not_speak_of_is_not_missed(changed, llama):
    folder = changed(lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert findings(scan(folder)) == ()


def test_a_table_of_another_size(changed):
    folder = changed(lambda tensors: None, vocab_size=66)
    assert problems(folder) == {("shape", "model.embed_tokens.weight")}


def test_rows_beyond_the_vocabulary_are_padding(changed):
    folder = changed(lambda tensors: None, vocab_size=60)
    assert problems(folder) == {("shape", "model.embed_tokens.weight")}
    assert findings(scan(folder)) == ()


def test_a_table_as_wide_as_another_size_of_the_config(changed):
    assert problems(changed(lambda tensors: None, hidden_size=8)) == {
        ("shape", "model.embed_tokens.weight")
    }
    folder = changed(lambda tensors: None, hidden_size=8, word_embed_proj_dim=16)
    assert problems(folder) == set()


def test_layers_beyond_the_config_are_unexpected_and_no_finding(changed):
    folder = changed(lambda tensors: None, num_hidden_layers=3)
    assert problems(folder) == {("unexpected", "model.layers.3")}
    assert findings(scan(folder)) == ()


def test_a_layer_of_another_kind_is_not_missing_anything(changed):
    def edit(tensors):
        for name in [n for n in tensors if n.startswith("model.layers.1.mlp.")]:
            tensors[name.replace("mlp", "dense_mlp")] = tensors.pop(name)
        del tensors["model.layers.0.input_layernorm.weight"]

    assert problems(changed(edit)) == set()


def test_garbage_memory_is_ns105(changed):
    def edit(tensors):
        bits = torch.frombuffer(bytearray(b"some text that stood here" * 99), dtype=torch.uint8)
        tensors["lm_head.weight"] = bits[: 64 * 16 * 2].view(torch.bfloat16).reshape(64, 16).clone()

    assert "NS105" in codes(changed(edit))


def test_decayed_weights_are_not_garbage(changed):
    def edit(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][0] *= 1e-38

    folder = changed(edit)
    assert codes(folder) == []
    assert sum(tensor.stats.subnormal for tensor in scan(folder).tensors) > 0


def test_fit_of_float16_names_what_overflows(changed):
    def edit(tensors):
        tensors["model.norm.weight"][2] = 1e5

    rows = {tensor.name: tensor for tensor in scan(changed(edit)).tensors}
    fit = rows["model.norm.weight"].fits[0]
    assert (fit.format, fit.overflow) == ("float16", 1)
    assert fit.headroom_bits < 0
    assert fit.exact


def test_shards_and_pickles_say_the_same(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    names = sorted(tensors)
    halves = {"a": names[: len(names) // 2], "b": names[len(names) // 2 :]}
    for ending, save in (("safetensors", save_file), ("bin", torch.save)):
        folder = tmp_path / ending
        folder.mkdir()
        (folder / "config.json").write_text((llama / "config.json").read_text())
        for part, held in halves.items():
            save({name: tensors[name] for name in held}, folder / f"{part}.{ending}")
        stem = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
        weight_map = {name: f"{part}.{ending}" for part, held in halves.items() for name in held}
        (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save(tensors, tmp_path / "one.bin")
    expected = {tensor.name: tensor.stats for tensor in scan(llama).tensors}
    for path in (tmp_path / "safetensors", tmp_path / "bin", tmp_path / "one.bin"):
        found = scan(path)
        assert {tensor.name: tensor.stats for tensor in found.tensors} == expected
        assert findings(found) == ()


def test_index_and_shards_that_disagree(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    save_file(tensors, tmp_path / "x.safetensors")
    index = dict.fromkeys([*list(tensors)[1:], "gone.weight"], "x.safetensors")
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": index}))
    kinds = {(problem.kind, problem.name) for problem in scan(tmp_path).keys}
    assert kinds == {("missing", "gone.weight"), ("unexpected", next(iter(tensors)))}
    file.write_text(json.dumps({"weight_map": index | {"w": "y.safetensors"}}))
    with pytest.raises(NanstopError, match=r"1 of 2 shards missing: y\.safetensors"):
        scan(tmp_path)
    file.write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))
    with pytest.raises(NanstopError, match="not a file of the same folder"):
        scan(tmp_path)


def adapter(folder, fill):
    pair = {f"base_model.model.layers.0.q.lora_{x}.weight": torch.randn(4, 4) for x in "AB"}
    pair["base_model.model.layers.0.q.lora_B.weight"] *= fill
    save_file(pair, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return pair


def test_adapters(tmp_path):
    pair = adapter(tmp_path, 1.0)
    assert (scan(tmp_path).kind, scan(tmp_path).architecture) == ("adapter", "LORA")
    assert codes(tmp_path) == []
    save_file(dict([pair.popitem()]), tmp_path / "adapter_model.safetensors")
    assert codes(tmp_path) == ["NS105"]
    adapter(tmp_path, 0.0)
    [finding] = findings(scan(tmp_path))
    assert "never trained" in finding.cause


def test_formats_without_a_range(tmp_path):
    held = {
        "packed": torch.arange(-100, 100, dtype=torch.int8),
        "eight": torch.tensor([1.0, -448.0, 2.0**-9]).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "yes": torch.tensor([True]),
        "double": torch.tensor([1e300], dtype=torch.float64),
        "complex": torch.tensor([1j]),
        "strided": torch.randn(6, 4).t(),
    }
    torch.save({"model": held, "step": 3}, tmp_path / "mixed.pt")
    rows = {t.name.removeprefix("model."): t for t in scan(tmp_path / "mixed.pt").tensors}
    assert set(rows) == set(held)
    assert rows["packed"].stats.absmax == 100.0
    assert rows["packed"].fits == rows["nothing"].fits == ()
    assert (rows["eight"].stats.absmax, rows["eight"].stats.subnormal) == (448.0, 1)
    assert rows["scalar"].stats.absmax == 3.0
    assert rows["nothing"].note == "no elements"
    assert not rows["complex"].measured
    assert rows["double"].stats.absmax == 1e300
    assert rows["strided"].stats.absmax == float(held["strided"].abs().max())


class Bomb:
    def __reduce__(self):
        return os.system, ("touch scan-ran-code",)


def damaged(folder):
    save_file({"w": torch.ones(300)}, folder / "whole.safetensors")
    torch.save({"w": torch.ones(300)}, folder / "whole.bin")
    for name in ("whole.safetensors", "whole.bin"):
        data = (folder / name).read_bytes()
        (folder / name.replace("whole", "cut")).write_bytes(data[: len(data) // 2])
        (folder / name.replace("whole", "empty")).write_bytes(b"")
    torch.save({"w": Bomb()}, folder / "bomb.bin")
    (folder / "text.bin").write_text("hello")
    (folder / "model.gguf").write_text("GGUF")
    (folder / "none").mkdir()
    (folder / "none" / "optimizer.pt").write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut.safetensors", "not a sound safetensors file"),
        ("empty.safetensors", "not a sound safetensors file"),
        ("cut.bin", "not a sound torch.save file"),
        ("empty.bin", "not a sound torch.save file"),
        ("text.bin", "not a sound torch.save file"),
        ("bomb.bin", "need code to load"),
        ("model.gguf", "not a checkpoint that scan can read"),
        ("none", "no weights in this folder"),
        ("absent", "no such checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_a_clear_error(tmp_path, name, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    damaged(tmp_path)
    assert cli.main(["scan", name]) == cli.USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "scan-ran-code").exists()


def test_threads_give_the_same_answer(tmp_path):
    torch.manual_seed(0)
    big = torch.randn(9000, 1024).mul(0.01).half()
    big[8999, 1000] = math.inf
    save_file({"embed_tokens.weight": big, "w": big[:7].clone()}, tmp_path / "m.safetensors")
    alone = scan(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = scan(tmp_path)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert together.tensors == alone.tensors
    assert together.token_rows == alone.token_rows
    row = alone.tensors[0].stats
    assert (row.posinf, row.first_bad) == (1, (8999, 1000))
    assert not alone.tensors[0].exact
    full = scan(tmp_path, full=True).tensors[0]
    true = ((big != 0) & (big.abs() < torch.finfo(torch.float16).tiny)).sum()
    assert full.exact
    assert full.stats.subnormal == int(true)
    assert row.subnormal == pytest.approx(int(true), rel=0.1)


def test_command_prints_and_exits(changed, llama, capsys):
    assert cli.main(["scan", str(llama)]) == cli.OK
    text = capsys.readouterr().out
    assert "LlamaForCausalLM" in text
    assert "float8_e4m3fn" in text
    folder = changed(lambda t: t["lm_head.weight"].__setitem__((1, 1), math.nan))
    assert cli.main(["scan", str(folder), "--json"]) == cli.FINDINGS
    value = json.loads(capsys.readouterr().out)
    assert value["findings"][0]["code"] == "NS106"
    assert value["tensors"][0]["name"] == "lm_head.weight"


def test_scan_imports_no_host_library(llama):
    code = (
        "import sys; from pathlib import Path;"
        "from nanstop.commands.scan.scan import scan, findings;"
        f"findings(scan(Path({str(llama)!r})));"
        "print([n for n in ('transformers', 'peft', 'trl') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
