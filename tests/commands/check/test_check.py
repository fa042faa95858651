"""What is concluded before a run, on this machine and on another, and which words are configs."""

import json

import pytest

from nanstop.commands.check.check import (
    check_checkpoint,
    is_checkpoint,
    is_config,
    preflight,
    read_machine,
)
from nanstop.commands.check.result import Preflight
from nanstop.commands.check.text import render
from nanstop.errors import NanstopError
from nanstop.records import (
    Atom,
    Diagnosis,
    Environment,
    PrecisionFacts,
    Probe,
    RangeRow,
    RunFacts,
    StepId,
)

HERE = Environment(nanstop="0", python="3")
V100 = Environment(nanstop="0", python="3", gpu="Tesla V100", capability="7.0")
BF16 = RunFacts(
    host="SFTTrainer", precision=PrecisionFacts(requested="bfloat16", option="bf16=True")
)


def codes(seen, machine=None):
    return [one.code for one in preflight(seen, machine).findings]


def test_another_machine_has_findings_of_its_own():
    seen = Preflight(facts=BF16, environment=HERE)
    assert codes(seen) == []
    assert codes(seen, V100) == ["NS104"]
    there = preflight(seen, V100)
    assert (there.facts.device, there.facts.autocast) == ("cuda", "bfloat16")
    assert there.environment == V100


def test_a_machine_without_a_gpu_changes_no_device():
    seen = Preflight(facts=BF16, environment=HERE)
    assert preflight(seen, HERE).facts == BF16


def test_ranges_of_the_probe_are_evidence():
    row = RangeRow(module="norm", op="mul", dtype="float16", absmax=4e4, headroom_bits=0.7)
    probe = Probe(at=StepId(run="r", step=0), num_micro=1, ranges=(row,))
    facts = RunFacts(autocast="float16")
    found = preflight(Preflight(facts=facts, environment=HERE, probe=probe)).findings
    assert [one.code for one in found] == ["NS101"]
    assert "`norm` reached 40000" in found[0].cause
    assert codes(Preflight(facts=facts, environment=HERE)) == []


def test_the_text_says_what_was_looked_at():
    seen = Preflight(facts=BF16, environment=HERE, failures=("not probed: out of memory",))
    assert render(preflight(seen)) == (
        "note: not probed: out of memory\n"
        "nanstop: SFTTrainer: nothing found (facts alone, nothing was run, 0.0 s)"
    )
    text = render(preflight(seen, V100))
    assert text.startswith("warning[NS104]: bfloat16 on a GPU that has no units for it")
    assert "asked for by `bf16=True`" in text
    assert text.endswith("1 finding (facts alone, nothing was run, 0.0 s)")


def test_a_machine_is_read_from_what_env_prints(tmp_path, capsys):
    from nanstop import cli

    assert cli.main(["env", "--json"]) == 0
    file = tmp_path / "machine.json"
    file.write_text(capsys.readouterr().out)
    plain = json.loads(file.read_text())
    found = read_machine(file)
    assert found.torch == plain["torch"]
    assert dict(found.packages) == plain["packages"]
    file.write_text('{"gpu": "NVIDIA H20", "cublas": "12.1.3.1"}')
    assert read_machine(file).gpu == "NVIDIA H20"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not JSON"),
        ("[1]", "not the facts of a machine"),
        ('{"gpuu": "x"}', r"unknown fact of a machine in .*: `gpuu`"),
        ('{"gpu": 3}', r"Environment\.gpu: input should be a valid string"),
        ('{"packages": 3}', "packages is a mapping"),
    ],
)
def test_a_machine_that_is_none(tmp_path, text, message):
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(NanstopError, match=message):
        read_machine(file)


def test_one_cause_is_told_once():
    wide = ((Atom(remedy="fp32_trainables"),),)
    found = tuple(
        Diagnosis(code=code, title="half weights", cause="why", confidence="likely", remedies=cure)
        for code, cure in (("NS102", wide), ("NS110", wide), ("NS101", ()), ("NS103", ()))
    )
    text = render(Preflight(facts=BF16, environment=HERE, findings=found))
    assert text.count("help: ") == 1
    assert "also NS110, half weights: why; the help of NS102 mends it too" in text
    assert text.count("warning[") == 3
    assert "4 findings" in text


def test_a_config_stands_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dpo.yaml").write_text("{}")
    assert is_config(["dpo.yaml"])
    assert not is_config(["train.py", "--config", "dpo.yaml"])
    with pytest.raises(NanstopError, match="takes no arguments"):
        is_config(["dpo.yaml", "--lr", "3"])
    with pytest.raises(NanstopError, match="unknown config file") as raised:
        is_config(["dop.yml"])
    assert "did you mean `dpo.yaml`?" in raised.value.hint


def test_a_checkpoint_is_scanned(tmp_path):
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({"layer.weight": torch.tensor([[1.0, float("nan")]])}, file)
    assert is_checkpoint([str(file)])
    assert is_checkpoint([str(tmp_path)])
    assert not is_checkpoint(["train.py"])
    assert [one.code for one in check_checkpoint(file).findings] == ["NS106"]
    with pytest.raises(NanstopError, match="is a checkpoint and takes no arguments"):
        is_checkpoint([str(file), "--lr"])
