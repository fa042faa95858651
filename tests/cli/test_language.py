"""A command speaks the language that it is asked for, from its errors to the last line of a run."""

import os
import re
import subprocess
import sys

import pytest

from incident_records import report
from nanstop import cli
from nanstop.language.choice import VARIABLE
from nanstop.report.text.terminal import render
from nanstop.report.text.wrapping import columns
from nanstop.store.incidents import Store
from report.specimens import UNSOLVED

HAN = re.compile(r"[\u4e00-\u9fff]")
FAILING = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    p = torch.softmax(model(torch.ones(2, 4)) * (3000 if step == 2 else 1), -1)
    loss = -torch.log(p[:, 0]).mean() - torch.log(p[:, 1]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path):
    store = Store(tmp_path / "run")
    incident_id, _ = store.open_incident()
    store.write_report(report(incident_id))
    return store.folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--lang", "zh", "--on-failur", "skip", "x.py"], "未知的 `nanstop run` 的选项"),
        (["run", "--lang", "zh", "nowhere.py"], "没有这样的"),
        (["report", "--lang", "zh", "nowhere"], "故障文件夹"),
        (["fix", "--lang", "zh", "--diff", "--apply"], "--diff 显示，--apply 写入"),
        (["check", "--lang", "zh", "nowhere.py"], "没有这样的"),
        (["explain", "--lang", "zh"], "CODE 和 --symptom 只给一个"),
    ],
)
def test_errors_are_chinese(capsys, arguments, said):
    assert cli.main(arguments) == cli.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error[NS001]: ")
    assert os.environ[VARIABLE] == "en"


def test_a_language_that_is_none_of_ours_is_an_error(capsys):
    assert cli.main(["report", "--lang", "fr"]) == cli.USAGE
    assert "unknown language: `fr`\nhelp: known: en, zh" in capsys.readouterr().err


def test_a_report_is_chinese_and_its_json_is_not(capsys, folder, monkeypatch):
    cli.main(["report", str(folder), "--json"])
    records = capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, "zh")
    cli.main(["report", str(folder), "--json"])
    assert capsys.readouterr().out == records
    cli.main(["report", str(folder)])
    assert "首次在第" in capsys.readouterr().out
    cli.main(["report", "--full", str(folder)])
    shown = capsys.readouterr().out
    assert "  = 不知道是哪个样本\n" in shown
    assert "解决: 让 `model.layers.2.norm` 保持 float32" in shown


@pytest.mark.parametrize("width", [40, 60, 80])
def test_chinese_lines_fit_a_terminal(monkeypatch, width):
    """A character takes two columns, no line begins with a comma, columns of tensors align."""
    monkeypatch.setenv(VARIABLE, "zh")
    lines = render(UNSOLVED, width=width).splitlines()
    long = [line for line in lines if columns(line) > width and " " in line.strip()]
    assert long == []
    assert not any(line.strip()[:1] in "，。；：、）" for line in lines)
    whole = render(UNSOLVED).splitlines()
    rows = [line for line in whole if line.startswith(("      输入", "      输出"))]
    assert len(rows) == 2
    assert (
        len(
            {
                columns(line[: line.index(mark)])
                for line, mark in zip(rows, ("有限", "上限"), strict=True)
            }
        )
        == 1
    )


def ran(*arguments, cwd):
    command = [sys.executable, "-m", "nanstop", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, encoding="utf-8", timeout=300, check=False
    )


def test_a_run_is_chinese_to_its_last_line(tmp_path):
    (tmp_path / "train.py").write_text(FAILING)
    done = ran("run", "--lang", "zh", "train.py", cwd=tmp_path)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line.startswith("  = ")]
    assert said
    assert all(HAN.search(line) for line in said)
    assert re.search(r"^nanstop：监视了 4 步，1 个故障（NS\d+）", done.stderr, re.MULTILINE)
    fixed = ran("fix", "--lang", "zh", cwd=tmp_path)
    assert fixed.stdout.startswith("修复: ")
    assert "+    loss = " in fixed.stdout
    assert not any(HAN.search(line) for line in fixed.stdout.splitlines() if line[:1] in "+-@ ")
