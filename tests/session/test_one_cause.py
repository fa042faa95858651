"""Findings that one help mends are of one cause: one warning, and a line for each of the others."""

from dataclasses import replace

import torch
from torch import nn

import nanstop
from nanstop.records import Atom, Diagnosis
from nanstop.report.text.run_end import RunEnd, end_line
from nanstop.report.text.runs import totals
from nanstop.session.findings import Findings
from nanstop.store.incidents import SUMMARY, load_summary


def test_half_weights_are_one_warning(tmp_path, capsys):
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).half()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    with nanstop.watch(net, optimizer, policy="observe", out=tmp_path) as watch:
        for _ in range(3):
            watch.step(lambda x: net(x).float().pow(2).mean(), torch.randn(4, 8).half())
            watch.update(clip=1.0)
    told = {one.code: one.mended_by for one in watch.findings}
    assert told == {"NS102": "", "NS110": "NS102", "NS112": "NS102"}
    said = capsys.readouterr().err
    assert [line.split("]")[0] for line in said.splitlines() if line.startswith("warning")] == [
        "warning[NS102"
    ]
    assert "also NS112, the norm to clip by is kept in float16" in said
    assert "1 warning (NS102)" in said
    summary = load_summary(tmp_path / SUMMARY)
    assert len(summary.findings) == 3
    assert totals(summary).endswith("1 warning")
    assert "1 warning (NS102)" in end_line(RunEnd(findings=watch.findings))


def clipped(folder, *, factor):
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with nanstop.watch(net, optimizer, policy="observe", out=folder) as watch:
        for _ in range(5):
            watch.step(lambda x: factor * net(x).pow(2).mean(), torch.randn(4, 8))
            watch.update(clip=1e-12)
    return watch


def test_a_limit_that_takes_all_gradients_is_told_once_by_what_it_did(tmp_path, capsys):
    watch = clipped(tmp_path, factor=1.0)
    assert [report.diagnoses[0].code for report in watch.incidents] == ["NS307"]
    assert not watch.findings
    assert "NS113" not in capsys.readouterr().err


def test_a_limit_far_below_eps_is_told_where_the_first_updates_show_nothing_of_it(tmp_path):
    watch = clipped(tmp_path, factor=1e-5)
    assert not watch.incidents
    assert [one.code for one in watch.findings] == ["NS113"]


def test_help_that_a_code_was_told_with_is_not_said_again():
    told = Findings(lambda finding: None)
    remedies = ((Atom(remedy="fp32_trainables"),),)
    expected = Diagnosis(code="NS111", title="", cause="", confidence="likely", remedies=remedies)
    assert told.without_help_again(expected) == expected
    measured = told.without_help_again(replace(expected, where="0.weight"))
    assert not measured.remedies
    assert measured.lines == ("what helps is said above, at the first NS111",)
    other = replace(expected, remedies=((Atom(remedy="clip", value="1"),),))
    assert told.without_help_again(other) == other
