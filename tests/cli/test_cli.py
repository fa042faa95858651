"""The command line as a user meets it: right answers, clear errors, exit codes."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

import nanstop
from incident_records import report
from nanstop import cli
from nanstop.session.factory import switched_off
from nanstop.store.incidents import Store, load_report
from nanstop.store.summary import FindingRow, Summary, summary_row


@pytest.fixture
def incidents(tmp_path):
    """A run's folder with two incidents, the second one unsolved."""
    store = Store(tmp_path / "run")
    for solved in (True, False):
        incident_id, _ = store.open_incident()
        made = report(incident_id)
        store.write_report(made if solved else type(made)(incident=made.incident))
    return store.folder


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["rn", "x.py"], "unknown command: `rn`", "did you mean `run`?"),
        (["train.py", "--lr", "3"], "`train.py` is a script", "try `nanstop run train.py --lr 3`"),
        (["--versoin"], "unknown option of `nanstop`: `--versoin`", "did you mean `--version`?"),
        (["run"], "missing argument 'COMMAND'", "see `nanstop run --help`"),
        (["report", "--html"], "option '--html' requires an argument", "see `nanstop --help`"),
        (
            ["run", "--on-failur", "skip", "x.py"],
            "unknown option of `nanstop run`",
            "did you mean `--on-failure`?",
        ),
        (
            ["run", "--on-failure", "skp", "x.py"],
            "unknown on_failure: `skp`",
            "did you mean `skip`?",
        ),
        (
            ["run", "--allow", "clp", "x.py"],
            "unknown remedy in allow: `clp`",
            "did you mean `clip`?",
        ),
        (
            ["check", "--sarfi", "out.sarif", "x.py"],
            "unknown option of `nanstop check`: `--sarfi`",
            "did you mean `--sarif`?",
        ),
        (["check", "x.py", "--sarif", "out.sarif"], "no such script: x.py", ""),
        (["explain", "NS2011"], "unknown finding: `NS2011`", "did you mean `NS201`?"),
        (
            ["explain", "fp16-overflw"],
            "unknown finding: `fp16-overflw`",
            "did you mean `fp16-overflow`?",
        ),
        (["explain", "NS201", "--lang", "fr"], "unknown language: `fr`", "known: en, zh"),
        (
            ["run", "--dir", "x", "a.py"],
            "unknown option of `nanstop run`: `--dir`",
            "mean `--out`?",
        ),
        (["demo", "s1-gemma-dpo-fp16"], "unknown scenario", "did you mean `s1-gemma3-dpo-fp16`?"),
        (
            ["demo", "s2-gemma-qlora-newtokens", "--variant", "half"],
            "unknown variant: `half`",
            "half-trainables",
        ),
        (["report", "no-such-folder"], "unknown incident folder: `no-such-folder`", ""),
        (["report", "~/none/here"], f"unknown incident folder: `{Path.home()}/none/here`", ""),
        (["fix", "~/none"], f"unknown incident folder: `{Path.home()}/none`", ""),
        (["export", "~/no", "--out=o"], f"no such checkpoint folder: {Path.home()}/no", ""),
        (
            ["run", "x.ipynb"],
            "x.ipynb is a notebook and cannot be run",
            "nanstop.watch(trainer)",
        ),
        (["run", "deepspeed"], "no such program: deepspeed", "`deepspeed` is not on PATH"),
        (["run", "torchrn"], "no such program: torchrn", "did you mean `torchrun`?"),
        (["rules", "extra"], "extra", "see `nanstop rules --help`"),
    ],
)
def test_a_user_error_is_one_clear_message(call, arguments, message, hint):
    code, out, err = call(*arguments)
    assert (code, out) == (cli.USAGE, "")
    assert err.startswith(
        f"error[NS001]: {message}" if arguments[0] != "rules" else "error[NS001]: "
    )
    assert message in err
    assert hint in err
    assert "Traceback" not in err


def test_an_exception_of_ours_is_one_line_and_a_file(call, monkeypatch):
    def broken(**_):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("nanstop.session.machine.environment", broken)
    code, out, err = call("env")
    assert (code, out) == (cli.INTERNAL, "")
    assert err.count("\n") == 1
    assert err.startswith("bug in nanstop: RuntimeError: first line second line (details: ")
    details = Path(err.rstrip().removesuffix(")").split("details: ")[1])
    assert "in broken" in details.read_text()
    details.unlink()


def test_ctrl_c_is_no_bug(call, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nanstop.session.machine.environment", interrupted)
    assert call("env") == (cli.INTERRUPTED, "", "")


def test_the_list_of_commands_has_one_sentence_or_two_on_each():
    commands = typer.main.get_command(cli.app).commands
    broken = [name for name, one in commands.items() if "\n" in one.help.partition("\n\n")[0]]
    assert broken == []


def test_version(call):
    assert call("--version") == (0, f"nanstop {nanstop.__version__}\n", "")


def test_explain(call):
    code, page, _ = call("explain", "ns201")
    assert code == 0
    assert page == nanstop.explain("NS201")
    assert page.startswith("# NS201 fp16-overflow: ")
    _, text, _ = call("explain", "fp16-overflow", "--json")
    assert json.loads(text)["page"] == page


def test_explain_lists_the_findings_that_log_a_symptom(call):
    code, text, _ = call("explain", "--symptom", "loss 0, grad_norm 0")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["NS701", "NS503", "NS505", "NS116"]
    assert text.splitlines()[1].split()[2:6] == ["loss", "nan", "grad_norm", "0"]
    _, rows, _ = call("explain", "--symptom", "loss 0, grad_norm 0", "--lang", "zh", "--json")
    assert json.loads(rows)[0] == {
        "code": "NS701",
        "name": "no-learning-signal",
        "title": "没有可学习的信号",
        "loss": "0",
        "grad_norm": "0",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of CODE and --symptom"),
        (["NS201", "--symptom", "loss 0"], "one of CODE and --symptom"),
        (["--symptom", "loss 0", "--run"], "--run goes with a CODE"),
        (["--symptom", "lss 0"], "unknown series: `lss`"),
    ],
)
def test_explain_is_asked_one_thing(call, arguments, said):
    code, out, err = call("explain", *arguments)
    assert (code, out) == (cli.USAGE, "")
    assert said in err


def test_explain_in_chinese(call):
    code, page, _ = call("explain", "fp16-overflow", "--lang", "zh")
    assert code == 0
    assert page == nanstop.explain("NS201", lang="zh")
    assert page.startswith("# NS201 fp16-overflow: 窄格式溢出\n")
    _, text, _ = call("explain", "ns201", "--lang", "zh", "--json")
    row = json.loads(text)
    assert (row["title"], row["page"]) == ("窄格式溢出", page)


def test_the_language_is_not_guessed_from_the_locale(call, monkeypatch):
    for name in ("LANG", "LC_ALL", "LANGUAGE"):
        monkeypatch.setenv(name, "zh_CN.UTF-8")
    assert call("explain", "NS201")[1] == nanstop.explain("NS201", lang="en")


@pytest.mark.parametrize("code", ["NS201", "NS502"])
def test_explain_runs_the_planted_fault_and_its_healthy_twin(call, code):
    _, text, _ = call("explain", code, "--run", "--json")
    row = json.loads(text)
    assert row["fault"]["codes"][0] == code
    assert row["healthy"]["codes"] == []


def test_explain_run_shows_the_reports(call):
    _, text, _ = call("explain", "NS503", "--run")
    fault, healthy = text.split("## The planted fault")[1].split("## Its healthy twin")
    assert "error[NS503]" in fault
    assert "nothing found" in healthy


def test_rules(call):
    _, text, _ = call("rules", "--json")
    rows = json.loads(text)
    _, table, _ = call("rules")
    assert len(table.splitlines()) == len(rows) > 0
    assert all(row["code"] in table and row["title"] in table for row in rows)


def test_env(call):
    code, text, _ = call("env", "--json")
    assert code == 0
    assert json.loads(text)["python"] == sys.version.split()[0]
    assert "float32_matmul_precision" in call("env")[1]


def test_report_of_one_incident(call, incidents):
    code, text, _ = call("report", incidents / "0000")
    assert code == 0
    assert "model.layers.2.norm" in text
    assert "step 412" in text
    _, text, _ = call("report", incidents / "0000", "--json")
    assert json.loads(text)["incident"]["id"] == "0000"


def test_report_of_a_folder_shows_its_runs_short_or_in_full(call, incidents, monkeypatch):
    Store(incidents).write_summary(
        Summary(
            incidents=(summary_row(load_report(incidents / "0001")),),
            findings=(FindingRow(code="NS102", title="half", where="w", confidence="certain"),),
            exit=0,
            steps=20,
            seconds=3.21,
            ended="clean",
        )
    )
    code, text, _ = call("report", incidents)
    assert code == cli.UNRESOLVED
    assert "20 steps in 3.2 s, ended well, 1 incident and 1 warning\n  0001  error[NS" in text
    assert "earlier\n  0000  error[NS" in text
    assert "warning[NS102] half  w\n" in text
    assert "help:" not in text
    assert "help:" in call("report", "--full", incidents)[1]
    monkeypatch.setenv("NANSTOP_DIR", str(incidents))
    assert call("report")[1] == text


def test_report_of_a_healthy_run(call, tmp_path):
    Store(tmp_path).write_summary(Summary(exit=0, steps=20, seconds=3.0, ended="clean"))
    code, text, _ = call("report", tmp_path)
    assert (code, text) == (0, "20 steps in 3 s, ended well, nothing found\n")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_explain_of_wrong_usage(call, lang):
    code, text, _ = call("explain", "ns001", "--lang", lang)
    assert (code, text.startswith("# NS001 usage-error: ")) == (0, True)


def test_an_option_behind_the_script_is_its_own_and_mentioned(tmp_path, capfd):
    (tmp_path / "x.py").write_text("import sys; print(sys.argv[1:])")
    out, script = str(tmp_path / "o"), str(tmp_path / "x.py")
    assert cli.main(["run", "--out", out, script, "--allow", "lr"]) == 0
    told = capfd.readouterr()
    assert told.out == "['--allow', 'lr']\n"
    assert "`--allow` stands after the command and is given to it" in told.err


def test_it_is_mentioned_where_no_option_of_ours_comes_first(tmp_path):
    (tmp_path / "x.py").write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "nanstop", "run", "x.py", "--on-failure", "stop"]
    told = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stdout == "['--on-failure', 'stop']\n"
    assert "`--on-failure` stands after the command and is given to it" in told.stderr


def test_a_switch_that_says_neither_on_nor_off_is_warned_of(caplog):
    assert not switched_off({"NANSTOP": "of"})
    assert "NANSTOP=of is not understood" in caplog.text
    caplog.clear()
    assert [switched_off({"NANSTOP": word}) for word in ("off", "0", "on", "")] == [1, 1, 0, 0]
    assert caplog.text == ""


def test_what_is_shown_of_records_is_short():
    made = report("0003")
    assert re.fullmatch(r"<incident 0003: NS\d+ .*, step 412, 2 times>", repr(made))
    assert repr(made.diagnoses[0]).startswith(f"<{made.diagnoses[0].code} ")


def test_report_of_a_run_says_that_an_incident_is_unresolved(call, incidents):
    code, text, _ = call("report", incidents, "--json")
    assert code == cli.UNRESOLVED
    assert [one["incident"]["id"] for one in json.loads(text)] == ["0000", "0001"]


def test_report_diagnoses_anew(call, incidents):
    file = incidents / "0000" / "report.json"
    plain = json.loads(file.read_text())
    plain["diagnoses"] = []
    file.write_text(json.dumps(plain))
    _, text, _ = call("report", file, "--json")
    assert json.loads(text)["diagnoses"][0]["code"].startswith("NS")


def test_what_strangers_wrote_does_not_steer_the_terminal(call, incidents):
    file = incidents / "0000" / "report.json"
    text = file.read_text().replace('"model.layers.2.norm"', '"evil\\u001b]0;title\\u0007\\u202e"')
    assert "evil" in text
    file.write_text(text)
    _, shown, _ = call("report", file)
    assert "evil" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    file.write_text(text.replace('"forward"', '"\\u001b[2J"'))
    assert "\x1b" not in call("report", file)[2]


def test_report_refuses_a_tampered_folder(call, incidents):
    (incidents / "0000" / "report.json").write_text('{"schema": 99}')
    code, _, err = call("report", incidents)
    assert code == cli.USAGE
    assert "schema 99" in err


@pytest.mark.parametrize(
    ("arguments", "command", "options"),
    [
        (["x.py", "--out", "theirs", "--json"], ["x.py", "--out", "theirs", "--json"], {}),
        (["--json", "-m", "pkg", "--json"], ["-m", "pkg", "--json"], {"as_json": True}),
        (["--out", "d", "x.py", "--", "y"], ["x.py", "--", "y"], {"out": Path("d")}),
        (["--out=d", "--", "--odd"], ["--odd"], {"out": Path("d")}),
        (
            ["--allow", "lr", "--allow=clip", "--on-failure", "stop", "trl", "dpo", "--help"],
            ["trl", "dpo", "--help"],
            {"allow": ["lr", "clip"], "on_failure": "stop"},
        ),
        (
            ["torchrun", "--nproc", "2", "x.py", "-m"],
            ["torchrun", "--nproc", "2", "x.py", "-m"],
            {},
        ),
    ],
)
def test_what_follows_the_users_command_is_never_ours(arguments, command, options):
    run = typer.main.get_command(cli.app).commands["run"]
    params = run.make_context("run", list(arguments)).params
    params["allow"] = list(params["allow"] or ())
    params["command"] = list(params["command"])
    params["out"] = params["out"] and Path(params["out"])  # typer before 0.16 converts it later
    defaults = {
        "on_failure": "repair",
        "out": None,
        "on_stop": "raise",
        "allow": [],
        "record": False,
        "series": False,
        "hang": None,
        "audit_devices": 0,
        "show_text": False,
        "quiet": False,
        "as_json": False,
        "live": False,
    }
    assert params == {"command": command} | defaults | options


@pytest.mark.parametrize(
    ("arguments", "command", "options"),
    [
        (["x.py", "--lr", "3"], ["x.py", "--lr", "3"], {}),
        (["x.py", "--json", "--sarif", "f"], ["x.py"], {"as_json": True, "sarif": Path("f")}),
        (["x.py", "--sarif=f", "--static"], ["x.py"], {"static": True, "sarif": Path("f")}),
        (["--sarif", "f", "x.py", "--out"], ["x.py", "--out"], {"sarif": Path("f")}),
        (["x.py", "--sarif", "f", "--lr"], ["x.py", "--sarif", "f", "--lr"], {}),
        (["x.py", "--machine", "f"], ["x.py", "--machine", "f"], {}),
        (["--", "x.py", "--sarif", "f"], ["x.py", "--sarif", "f"], {}),
    ],
)
def test_what_is_ours_of_a_check_may_stand_last(arguments, command, options):
    params = typer.main.get_command(cli.app).commands["check"].make_context("c", arguments).params
    params["command"] = list(params["command"])
    params["sarif"] = params["sarif"] and Path(params["sarif"])
    defaults = {"static": False, "machine": None, "sarif": None, "as_json": False}
    assert params == {"command": command} | defaults | options


def test_demo_lists_its_scenarios(call):
    code, text, _ = call("demo", "--list", "--json")
    assert code == 0
    names = [row["name"] for row in json.loads(text)]
    assert "s1-gemma3-dpo-fp16" in names
    assert all(name in call("demo", "--list")[1] for name in names)


def test_the_installed_command_answers_quickly():
    started = time.perf_counter()
    done = subprocess.run(
        [Path(sys.executable).parent / "nanstop", "explain", "NS201"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "float16" in done.stdout
    assert time.perf_counter() - started < 5  # 0.1 s here


def test_python_m_nanstop_gives_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "nanstop", "explain", "x"], capture_output=True, text=True
    )
    assert done.returncode == cli.USAGE
    assert done.stderr.startswith("error[NS001]: unknown finding: `x`")


def test_run_leaves_streams_arguments_and_exit_code_to_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    out = tmp_path / "incidents"
    done = subprocess.run(
        [sys.executable, "-m", "nanstop", "run", "--out", out, script, "--out", "theirs", "--json"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "['--out', 'theirs', '--json']\n", "")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["incidents"], summary["findings"], summary["exit"]) == ([], [], 7)


def test_a_path_behind_an_equals_sign_may_begin_at_home(call, incidents, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, _ = call("report", "~/run/0000", "--html=~/page.html")
    assert code in (cli.OK, cli.UNRESOLVED)
    assert (tmp_path / "page.html").is_file()
    assert nanstop.load("~/run/0000").id == "0000"
    assert nanstop.investigate("~/run/0000").incident.id == "0000"
    with pytest.raises(nanstop.NanstopError, match=str(tmp_path)):
        nanstop.load_plan("~/run")
