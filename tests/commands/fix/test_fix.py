"""`nanstop fix` on reports made by hand: what it shows, writes, refuses and leaves alone."""

import codecs
import json
import stat
import subprocess
from dataclasses import replace

import pytest

from incident_records import report
from nanstop import cli
from nanstop.records import (
    Atom,
    CommandFacts,
    Diagnosis,
    Environment,
    OptimizerFacts,
    ParamGroup,
    Proof,
    RunFacts,
    SourceLine,
)
from nanstop.report.text.terminal import render
from nanstop.store.incidents import Store

SCRIPT = """\
import torch

def objective(x):
    p = torch.softmax(x, -1)
    return -torch.log(p)[:, 0].mean()
"""
FIXED = SCRIPT.replace("torch.log(p)", "torch.log_softmax(x, -1)")
BAD_LINE = "return -torch.log(p)[:, 0].mean()"


def made(
    file, *atoms, text=BAD_LINE, line=5, command=None, proof=True, facts=None, op="log", source=None
):
    """A report of a failure at a line of ``file`` with this cure; ``source``: of data."""
    base = report()
    event = replace(
        base.localization.first_bad,
        op=f"aten.{op}.default",
        source=SourceLine(file=str(file), line=line, function="objective", text=text),
    )
    environment = Environment(nanstop="0", python="3", command=command)
    incident = replace(base.incident, environment=environment, facts=facts or RunFacts())
    offered = Diagnosis(
        code="NS207", title="log", cause="0", confidence="certain", remedies=(atoms,)
    )
    offered = replace(offered, at_source=source)
    return replace(
        base,
        incident=incident,
        localization=replace(base.localization, first_bad=event),
        diagnoses=(offered,) if atoms else (),
        proof=Proof(incident="0000", verdict="proven", minimal=atoms) if proof else None,
        audit=(),
    )


def stable(file, line=5):
    return Atom(remedy="stable_form", target=f"{file}:{line}", value="log_space")


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    """A folder with a script, an incident that a function puts there, and the command."""

    class Project:
        folder = tmp_path
        script = tmp_path / "train.py"

        def incident(self, *args, **kwargs):
            store = Store(tmp_path / ".nanstop")
            store.open_incident()
            store.write_report(made(*args, **kwargs))

        def fix(self, *words):
            code = cli.main(["fix", *words])
            captured = capsys.readouterr()
            return code, captured.out, captured.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NANSTOP_DIR")
    found = Project()
    found.script.write_text(SCRIPT)
    return found


def test_the_diff_is_shown_and_nothing_written(project):
    project.incident(project.script, stable(project.script))
    code, out, err = project.fix()
    assert (code, err) == (0, "")
    assert "--- a/train.py\n+++ b/train.py\n@@ -2,4 +2,4 @@\n" in out
    assert "\n-    return -torch.log(p)[:, 0].mean()\n" in out
    assert "\n+    return -torch.log_softmax(x, -1)[:, 0].mean()\n" in out
    assert "apply it with `nanstop fix .nanstop/0000 --apply`" in out
    assert project.script.read_text() == SCRIPT
    assert project.fix("--diff") == (code, out, err)


def test_applied_once_and_back(project):
    project.incident(project.script, stable(project.script))
    project.script.chmod(0o750)
    code, out, _ = project.fix(".nanstop", "--apply")
    assert code == 0
    assert "applied to train.py" in out
    assert "git apply -R .nanstop/0000/fix.diff" in out
    assert project.script.read_text() == FIXED
    assert stat.S_IMODE(project.script.stat().st_mode) == 0o750
    assert sorted(one.name for one in project.folder.iterdir()) == [".nanstop", "train.py"]
    code, out, _ = project.fix("--apply")
    assert code == 0
    assert "have this change already" in out
    assert project.script.read_text() == FIXED
    project.script.write_text(SCRIPT)
    assert project.fix("--apply")[0] == 0
    assert project.script.read_text() == FIXED


SHORT = SCRIPT.replace("\n\n", "\n")
ACCENTS = "# -*- coding: latin-1 -*-\n" + SHORT.replace("-1)\n", "-1)  # à côté\n")
WRITTEN = {
    "byte order mark": (codecs.BOM_UTF8 + SHORT.encode(), 4),
    "line ends of Windows": (SHORT.replace("\n", "\r\n").encode(), 4),
    "latin-1": (ACCENTS.encode("latin-1"), 5),
    "latin-1, line ends of Windows": (ACCENTS.replace("\n", "\r\n").encode("latin-1"), 5),
    "form feed": (SCRIPT.replace("\n\n", "\n\f\n").encode(), 5),
    "no last line end": (SCRIPT.rstrip().encode(), 5),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_script_keeps_its_encoding_and_its_line_ends(project, kind):
    before, line = WRITTEN[kind]
    project.script.write_bytes(before)
    project.incident(project.script, stable(project.script, line), line=line)
    assert project.fix("--apply")[0] == 0
    after = before.replace(b"torch.log(p)", b"torch.log_softmax(x, -1)")
    assert project.script.read_bytes() == after
    assert "have this change already" in project.fix("--apply")[1]
    assert project.script.read_bytes() == after
    undo = ["git", "apply", "-R", ".nanstop/0000/fix.diff"]
    assert subprocess.run(undo, cwd=project.folder, timeout=60).returncode == 0
    assert project.script.read_bytes() == before


def test_what_its_encoding_cannot_hold_is_not_written(project):
    config = project.folder / "sft.yaml"
    text = "# coding: ascii\nfp16: true\n"
    config.write_text(text)
    project.script.write_text("from torch.optim import SGD\nopt = SGD(p, lr=0.5)\n")
    command = CommandFacts(config=str(config), options=("--config",), supervised=True)
    project.incident(project.script, Atom(remedy="attention", value="é"), command=command)
    code, _, err = project.fix("--apply")
    assert code == 2
    assert "error[NS001]: cannot write sft.yaml" in err
    assert config.read_text() == text


def test_refused_where_the_line_has_changed(project):
    project.incident(project.script, stable(project.script))
    project.script.write_text("# new\n" + SCRIPT)
    code, _, err = project.fix("--apply")
    assert code == 2
    assert "error[NS001]: train.py:5 has changed since the incident" in err
    assert project.script.read_text() == "# new\n" + SCRIPT


@pytest.mark.parametrize("place", ["outside", "installed"])
def test_a_file_that_is_not_the_users_is_never_written(project, place, tmp_path_factory):
    folder = {
        "outside": tmp_path_factory.mktemp("other"),
        "installed": project.folder / "venv" / "site-packages",
    }[place]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "lib.py"
    library.write_text(SCRIPT)
    project.incident(library, stable(library))
    code, out, _ = project.fix("--apply")
    assert code == 3
    assert "is not yours to change" in out
    assert "lib.objective = objective" in out
    assert library.read_text() == SCRIPT


def test_a_link_out_of_the_project_is_not_followed(project, tmp_path_factory):
    outside = tmp_path_factory.mktemp("other") / "train.py"
    outside.write_text(SCRIPT)
    project.script.unlink()
    project.script.symlink_to(outside)
    project.incident(project.script, stable(project.script))
    assert project.fix("--apply")[0] == 3
    assert outside.read_text() == SCRIPT


def test_words_where_no_rewriting_is_known(project):
    text = SCRIPT.replace("    p = torch.softmax(x, -1)\n", "    p = x\n")
    project.script.write_text(text)
    project.incident(project.script, stable(project.script))
    code, out, _ = project.fix()
    assert code == 0
    assert "@@" not in out
    assert f"train.py:5: `{BAD_LINE}`: compute this logarithm from" in " ".join(out.split())
    code, _, _ = project.fix("--apply")
    assert code == 3
    assert project.script.read_text() == text


def test_an_argument_is_not_changed_twice(project):
    text = "from torch.optim import SGD\nopt = SGD(p, lr=0.5)\n"
    project.script.write_text(text)
    facts = RunFacts(optimizer=OptimizerFacts(name="SGD", lr=0.5))
    project.incident(project.script, Atom(remedy="lr", value="0.1"), facts=facts)
    for _ in range(2):
        assert project.fix("--apply")[0] == 0
        assert "lr=0.05)" in project.script.read_text()


def test_a_config_file_comes_before_the_script(project):
    config = project.folder / "sft.yaml"
    config.write_text("bf16: false\nfp16: true  # V100\n")
    command = CommandFacts(config=str(config), options=("--config",), supervised=True)
    project.incident(project.script, Atom(remedy="bf16"), command=command)
    code, out, _ = project.fix("--apply")
    assert code == 0
    assert config.read_text() == "bf16: true\nfp16: false  # V100\n"
    assert "--- a/sft.yaml" in out


def test_options_of_a_command_line(project):
    command = CommandFacts(options=("--fp16", "--model"), supervised=True)
    project.incident("nowhere.py", Atom(remedy="bf16"), command=command)
    code, out, _ = project.fix()
    assert code == 0
    assert "on the command line: `--fp16 false --bf16 true`" in out
    assert "or leave the code as it is: `nanstop run --allow bf16 ...`" in out


def test_what_mends_data_where_it_is_prepared_is_allowed_in_no_run(project):
    guard = Atom(remedy="form", target=f"{project.script}:5", value="guarded:log")
    project.incident(project.script, Atom(remedy="drop_sample", target="0:3"), source=guard)
    _, out, _ = project.fix()
    assert "[tried on its rows]" in out
    assert "torch.log(p.clamp(min=torch.finfo(p.dtype).tiny))" in out
    assert "allow" not in out


def test_the_script_is_where_it_is_set_up(project):
    project.script.write_text("from trl import SFTConfig\nSFTConfig()\n")
    command = CommandFacts(script=str(project.script))
    atom = Atom(remedy="clip", value="1")
    project.incident("/x/site-packages/lib.py", atom, command=command)
    _, out, _ = project.fix()
    assert "+SFTConfig(max_grad_norm=1.0)" in out
    assert '`allow=("clip",)`' in out


def test_no_cure_is_said_so(project):
    project.incident(project.script)
    code, out, _ = project.fix()
    assert code == 3
    assert "no cure is known" in out


def test_as_json(project):
    project.incident(project.script, stable(project.script), proof=False)
    code, out, _ = project.fix("--json")
    found = json.loads(out)
    assert (code, found["status"], found["proof"]) == (0, "shown", "not tried")
    assert found["files"][0]["file"] == "train.py"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "unknown incident folder: `nowhere`"),
        (["--diff", "--apply"], "--diff shows and --apply writes"),
        ([], "unknown incident folder"),
    ],
)
def test_errors(project, words, message):
    code, _, err = project.fix(*words)
    assert code == 2
    assert f"error[NS001]: {message}" in err


def test_the_printed_incident_shows_the_new_line(project):
    report = made(project.script, stable(project.script))
    shown = render(report, record=".nanstop/0000/report.json")
    lines = shown.splitlines()
    place = next(at for at, one in enumerate(lines) if one.startswith("in code:"))
    assert "train.py:5" in lines[place]
    assert "`nanstop fix .nanstop/0000`" in lines[place]
    assert lines[place + 1] == "  + return -torch.log_softmax(x, -1)[:, 0].mean()"
    assert lines[place + 1] in render(report, width=20).splitlines()
    project.script.write_text("def broken(:\n")
    assert "in code" not in render(made(project.script, stable(project.script)))


@pytest.mark.parametrize("supervised", [True, False])
def test_how_a_cure_is_allowed(supervised):
    command = CommandFacts(supervised=supervised)
    shown = render(made("x.py", Atom(remedy="clip", value="1"), command=command))
    how = "`nanstop run --allow clip ...`" if supervised else '`allow=("clip",)`'
    assert f"it changes training, and is applied only with {how}" in shown


@pytest.mark.parametrize(
    ("autocast", "dtype", "value", "is_said"),
    [
        (None, "float16", "float32", True),
        (None, "float32", "float32", False),
        ("float16", "float16", "float32", False),
        (None, "float16", "float32->input", False),
    ],
)
def test_what_an_island_s_code_needs_beside_the_step(project, autocast, dtype, value, is_said):
    project.script.write_text("import torch\nmodel = Net()\n")
    group = ParamGroup(dtype=dtype, trainable=True, num_tensors=1, num_elements=1)
    facts = RunFacts(param_groups=(group,), autocast=autocast, device="cpu")
    island = Atom(remedy="island", target="norm", value=value)
    project.incident(project.script, island, facts=facts)
    said = " ".join(project.fix()[1].split())
    assert ('`torch.autocast("cpu", dtype=torch.float16)` around it' in said) == is_said
    assert "torch says that formats differ" in said or not is_said
