"""Findings as SARIF 2.1.0: held to the schema of OASIS, at real lines, whatever names hold."""

import json
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import nanstop
from nanstop import cli
from nanstop.commands.check.result import Preflight
from nanstop.commands.check.sarif import checked_file, sarif_log
from nanstop.errors import NanstopError
from nanstop.records import Diagnosis, Environment, RunFacts, SourceLine

SCHEMA = Path(__file__).with_name("sarif-schema-2.1.0.json")
HERE = Environment(nanstop="0", python="3")
SETTINGS = "model_name_or_path: model\ndataset_name: data\noutput_dir: out\n"
DPO = f"{SETTINGS}precompute_ref_log_probs: false\n"
LOOP = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model[0], model[2] = nn.Linear(4, 8), nn.Linear(8, 1)
for index in range(3):
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
"""
HOSTILE = "<b>[free](http://a.example) \x1b[31m\x00\r\n\u202eend `x` {0}\udcff"


@pytest.fixture(scope="module")
def valid():
    """Hold a log to the schema, and return its only run."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'nanstop[dev]'")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft4Validator.check_schema(schema)
    checker = jsonschema.Draft4Validator(schema)

    def check(log):
        assert [(list(e.absolute_path), e.message) for e in checker.iter_errors(log)] == []
        (run,) = log["runs"]
        return run

    return check


def finding(code="NS102", **fields):
    told = {"title": "half weights", "cause": "they are trained", "confidence": "likely"}
    return Diagnosis(code=code, **(told | fields))


def log(*findings, target=None, folder=None, failures=()):
    facts = RunFacts(host="SFTTrainer")
    seen = Preflight(facts=facts, environment=HERE, findings=findings, failures=failures)
    return sarif_log(seen, target, folder or Path.cwd(), version="1.2.3")


def place(result):
    (location,) = result["locations"]
    return location["physicalLocation"]


def test_nothing_to_say_is_a_run_with_no_results(valid):
    run = valid(log(failures=("not probed: \x07out of memory",)))
    assert run["results"] == run["tool"]["driver"]["rules"] == []
    (notes,) = run["invocations"]
    assert notes["executionSuccessful"]
    (note,) = notes["toolExecutionNotifications"]
    assert note["message"]["text"] == "not probed: \ufffdout of memory"


def test_a_rule_is_described_by_its_page(valid):
    run = valid(log(finding("NS103"), finding("NS102", confidence="certain")))
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("nanstop", "1.2.3")
    assert driver["informationUri"].startswith("https://")
    assert [rule["id"] for rule in driver["rules"]] == ["NS102", "NS103"]
    assert driver["rules"][0]["help"]["markdown"] == nanstop.explain("NS102")
    assert driver["rules"][0]["defaultConfiguration"] == {"level": "warning"}
    told = [(one["ruleId"], one["ruleIndex"], one["level"]) for one in run["results"]]
    assert told == [("NS103", 1, "warning"), ("NS102", 0, "warning")]
    assert [one["properties"]["certainty"] for one in run["results"]] == ["likely", "certain"]


@pytest.mark.parametrize("name", ["train.py", "my dir/训练 1%.py", "a:b/[c]#?.py"])
def test_a_known_line_is_a_region_of_a_relative_file(tmp_path, valid, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("1\n2\n3\n")
    line = SourceLine(file=str(file), line=3, function="main", text="3")
    found = finding(source=line, where=f"{file.name}:3")
    (result,) = valid(log(found, folder=tmp_path))["results"]
    found = place(result)
    assert found["region"] == {"startLine": 3}
    assert found["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
    uri = found["artifactLocation"]["uri"]
    assert uri.isascii()
    assert not set(uri) & set(" #?:[]\\")
    assert unquote(uri) == name
    assert "logicalLocations" not in result["locations"][0]


def test_a_file_outside_of_the_working_directory_is_a_whole_uri(tmp_path, valid):
    file = tmp_path / "lib x" / "mod.py"
    file.parent.mkdir()
    file.touch()
    (tmp_path / "work").mkdir()
    for spelled in (file, Path("..", "lib x", "mod.py")):
        found = finding(source=SourceLine(file=str(spelled), line=1, function="f"))
        (result,) = valid(log(found, folder=tmp_path / "work"))["results"]
        artifact = place(result)["artifactLocation"]
        assert urlsplit(artifact["uri"]).scheme == "file"
        assert artifact == {"uri": file.as_uri()}


def test_without_a_line_it_is_the_file_that_was_checked_and_no_region(tmp_path, valid):
    (tmp_path / "train.py").touch()
    gone = SourceLine(file=str(tmp_path / "gone.py"), line=3, function="f", text="x")
    for found in (finding(where="model.norm"), finding(where="model.norm", source=gone)):
        (result,) = valid(log(found, target=Path("train.py"), folder=tmp_path))["results"]
        (location,) = result["locations"]
        artifact = {"uri": "train.py", "uriBaseId": "%SRCROOT%"}
        assert location["physicalLocation"] == {"artifactLocation": artifact}
        assert location["logicalLocations"] == [{"fullyQualifiedName": "model.norm"}]


@pytest.mark.parametrize("where", ["", "SFTTrainer"])
def test_what_has_no_place_is_given_none(tmp_path, valid, where):
    (result,) = valid(log(finding(where=where), target=tmp_path / "folder"))["results"]
    assert result["locations"] == []
    (result,) = valid(log(finding(where="lm_head")))["results"]
    assert result["locations"] == [{"logicalLocations": [{"fullyQualifiedName": "lm_head"}]}]


@pytest.mark.parametrize("made_up", ["<string>", "<ipython-input-1>", "x" * 5000, "a\0b"])
def test_code_of_no_file_has_no_line(valid, made_up):
    found = finding(source=SourceLine(file=made_up, line=1, function="f", text="y"))
    (result,) = valid(log(found))["results"]
    assert result["locations"] == []


def test_names_of_strangers_are_plain_text(tmp_path, valid):
    found = finding(title=HOSTILE, cause=HOSTILE, lines=(HOSTILE,), where=HOSTILE)
    made = log(found, folder=tmp_path, failures=(HOSTILE,))
    (result,) = valid(made)["results"]
    text = result["message"]["text"]
    assert text.count("\n") == 1
    assert all(each.isprintable() for each in text.replace("\n", ""))
    assert "markdown" not in result["message"]
    assert r"\[free\](http" in text
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"].isprintable()
    json.dumps(made, ensure_ascii=False).encode()


def test_a_fingerprint_follows_the_text_of_a_line_and_not_its_number(tmp_path, valid):
    (tmp_path / "train.py").touch()
    (tmp_path / "other.py").touch()

    def fingerprint(code="NS102", file="train.py", line=3, text="a = 1"):
        source = SourceLine(file=str(tmp_path / file), line=line, function="f", text=text)
        (result,) = valid(log(finding(code, source=source), folder=tmp_path))["results"]
        return tuple(result["partialFingerprints"].items())

    assert fingerprint() == fingerprint(line=9) == fingerprint(text="    a = 1")
    others = {
        fingerprint(code="NS103"),
        fingerprint(file="other.py"),
        fingerprint(text="a = 2"),
    }
    assert len(others | {fingerprint()}) == 4


def test_the_file_of_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "dpo.yaml", "data.json"):
        (tmp_path / name).touch()
    (tmp_path / "python").symlink_to(os.path.realpath("/bin/sh"))
    assert checked_file(["train.py", "data.json"]) == Path("train.py")
    assert checked_file([str(tmp_path / "python"), "dpo.yaml", "train.py"]) == Path("train.py")
    assert checked_file([str(tmp_path / "python"), "--config", "dpo.yaml"]) == Path("dpo.yaml")
    assert checked_file(["-m", "package", "x" * 5000]) is None


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write a config beside a saved model, in a folder whose name is not plain."""
    folder = tmp_path / "配 置"
    (folder / "model").mkdir(parents=True)
    monkeypatch.chdir(folder)
    saved = {"model_type": "gemma3", "text_config": {"dtype": "bfloat16"}}
    Path("model", "config.json").write_text(json.dumps(saved))

    def write(text):
        Path("dpo.yaml").write_text(text)
        return Path("dpo.yaml")

    return write


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_a_config_with_a_fault_has_its_line(config, call, valid):
    path = config(f"{DPO}# a comment\nfp16: true\nuse_peft: true\n")
    plain = call("check", path)
    assert call("check", path, "--sarif", "out.sarif") == plain
    assert plain[0] == cli.FINDINGS
    run = valid(json.loads(Path("out.sarif").read_text(encoding="utf-8")))
    assert run["tool"]["driver"]["version"] == nanstop.__version__
    (result,) = run["results"]
    assert result["ruleId"] == "NS101"
    assert "float16" in result["message"]["text"]
    assert place(result) == {
        "artifactLocation": {"uri": "dpo.yaml", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 6},
    }
    root = run["originalUriBaseIds"]["%SRCROOT%"]["uri"]
    assert root == Path.cwd().as_uri() + "/"

    first = result["partialFingerprints"]
    config(f"fp16: true\n{DPO}use_peft: true\n")
    code, out, _ = call("check", "--json", "--sarif=out.sarif", path)
    assert code == cli.FINDINGS
    assert json.loads(out)["findings"][0]["source"]["line"] == 1
    (result,) = valid(json.loads(Path("out.sarif").read_text(encoding="utf-8")))["results"]
    assert place(result)["region"] == {"startLine": 1}
    assert result["partialFingerprints"] == first


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_a_fault_of_two_settings_has_the_file_alone(config, call, valid, monkeypatch):
    path = config(f"{DPO}max_steps: 10\nwarmup_steps: 20\n").resolve()
    monkeypatch.chdir(path.parent.parent)
    assert call("check", path, "--sarif", "made/out.sarif")[0] == cli.FINDINGS
    (result,) = valid(json.loads(Path("made", "out.sarif").read_text(encoding="utf-8")))["results"]
    assert result["ruleId"] == "NS113"
    uri = "%E9%85%8D%20%E7%BD%AE/dpo.yaml"
    assert place(result) == {"artifactLocation": {"uri": uri, "uriBaseId": "%SRCROOT%"}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_a_healthy_config_is_an_empty_run(config, call, valid):
    path = config(DPO)
    code, out, _ = call("check", path, "--sarif", "out.sarif")
    assert (code, "nothing found" in out) == (cli.OK, True)
    assert valid(json.loads(Path("out.sarif").read_text(encoding="utf-8")))["results"] == []


def test_a_script_has_the_line_of_its_optimizer(tmp_path, call, valid, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Path("my runs", "训练.py")
    script.parent.mkdir()
    script.write_text(LOOP, encoding="utf-8")
    code, _, err = call("check", script, "--sarif", "out.sarif")
    assert code == cli.FINDINGS, err
    run = valid(json.loads(Path("out.sarif").read_text(encoding="utf-8")))
    result = next(one for one in run["results"] if one["ruleId"] == "NS114")
    assert unquote(place(result)["artifactLocation"]["uri"]) == "my runs/训练.py"
    assert place(result)["region"] == {"startLine": 5}


def test_a_checkpoint_of_a_strange_name(tmp_path, call, valid, monkeypatch):
    import torch
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a b\x1b[31m.safetensors"
    save_file({f"layer{HOSTILE[:-1]}": torch.tensor([[1.0, float("nan")]])}, file)
    code, _, _ = call("check", file.name, "--sarif", "out.sarif")
    assert code == cli.FINDINGS
    run = valid(json.loads(Path("out.sarif").read_text(encoding="utf-8")))
    result = next(one for one in run["results"] if one["ruleId"] == "NS106")
    uri = place(result)["artifactLocation"]["uri"]
    assert uri == "a%20b%1B%5B31m.safetensors"
    assert "\x1b" not in json.dumps(run, ensure_ascii=False)


def test_a_path_that_cannot_be_written_is_one_clear_message(tmp_path, call, monkeypatch):
    import torch
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    save_file({"layer.weight": torch.ones(2, 2)}, "model.safetensors")
    before = Path("model.safetensors").read_bytes()
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for wrong in ("file/out.sarif", "folder", "model.safetensors", "x" * 5000):
        code, out, err = call("check", "model.safetensors", "--sarif", wrong)
        assert code == cli.USAGE
        assert out.startswith("nanstop: ")
        assert err.startswith(f"error[NS001]: cannot write {wrong}: ")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder", "model.safetensors"]
    assert Path("model.safetensors").read_bytes() == before


def test_the_script_keeps_what_stands_behind_two_dashes(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("check", "--", "gone.py", "--sarif", "out.sarif")
    assert code == cli.USAGE
    assert "no such script: gone.py" in err
    with pytest.raises(NanstopError, match="no such script"):
        checked_file(["gone.py"])
