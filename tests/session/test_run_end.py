"""What is said of a run that remedies were in force in is true at its end."""

import math
import platform
import shlex
from dataclasses import replace

import pytest
import torch
from torch import nn

from fnstep import FnStep
from incident_records import AT, report
from nanstop.decide.policy import Policy
from nanstop.records import Atom, Diagnosis
from nanstop.report.announce import short
from nanstop.report.text.run_end import RunEnd, end_line, said_again
from nanstop.report.text.runs import totals
from nanstop.session.run_end import folders_of
from nanstop.session.session import Session
from nanstop.store.incidents import Store
from nanstop.store.summary import Summary, summary_row

HARMS = {
    "": lambda model, optimizer, series: None,
    "`0.weight`": lambda model, optimizer, series: model[0].weight.data.fill_(math.inf),
    "`0.bias:exp_avg`": lambda model, optimizer, series: optimizer.state[model[0].bias][
        "exp_avg"
    ].fill_(math.nan),
    "`loss`": lambda model, optimizer, series: series.add("loss_raw", 3, torch.tensor(math.nan)),
}


@pytest.mark.parametrize("broken", HARMS)
def test_a_run_is_said_to_be_kept_finite_only_where_it_is(tmp_path, broken):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    step = FnStep(model, lambda net, b: net(b["x"]).mean(), [{"x": torch.ones(2, 4)}], optimizer)
    news = []
    session = Session(
        policy=Policy(),
        store=Store(tmp_path),
        view=step.view,
        facts=step.facts,
        announce=news.append,
    )
    session.start()
    session.adopt((Atom(remedy="island", target="0", value="float32"),))
    step.run(0)
    step.update()
    session.series.add("loss_raw", 2, torch.tensor(0.5))
    HARMS[broken](model, optimizer, session.series)
    session.finish()
    said = end_line(news[-1])
    assert said.startswith("0 steps watched, nothing found; ")
    assert ("kept finite by" in said) == (not broken)
    assert broken in said


def test_what_another_rank_met_is_not_nothing(tmp_path):
    for rank, ending in ((1, "1 incident (NS201, 2 times)"), (0, "nothing found")):
        folder = tmp_path / str(rank)
        theirs = Store(folder, "run")
        theirs.open_incident()
        met = replace(AT, rank=rank)
        theirs.write_report(report(at=met))
        rows = tuple(map(summary_row, theirs.reports.values()))
        theirs.write_summary(Summary(incidents=rows))
        model, news = nn.Linear(4, 1), []
        step = FnStep(model, lambda net, b: net(b["x"]).mean(), [{"x": torch.ones(2, 4)}], None)
        store, policy = Store(folder, "run"), Policy()
        session = Session(
            policy=policy, store=store, view=step.view, facts=step.facts, announce=news.append
        )
        session.start()
        session.finish()
        assert end_line(news[-1]).startswith(f"0 steps watched, {ending}")


ISLAND = Atom(remedy="island", target="norm", value="float32")
FORM = Atom(remedy="stable_form", target="/x/a.py:3", value="log_space")


def ended(**seen):
    return end_line(RunEnd(**seen))


def test_a_healthy_run_ends_in_one_line():
    assert ended(steps={1: 20}) == "20 steps watched, nothing found"
    assert ended(steps={1: 1}) == "1 step watched, nothing found"


def test_updates_of_all_optimizers_are_counted():
    said = "260 updates of several optimizers watched, nothing found"
    assert ended(steps={1: 100, 2: 160}) == said


def test_what_was_met_lost_left_out_and_kept_finite_is_said_in_one_line():
    micro, sample = Atom(remedy="drop_micro", target="0"), Atom(remedy="drop_sample", target="0:3")
    line = ended(
        steps={1: 30, 2: 30},
        failures={"0000": 29, "0001": 1},
        codes=("NS501", "NS201"),
        findings=(
            Diagnosis(code="NS102", title="", cause="", confidence="certain"),
            Diagnosis(code="NS802", title="", cause="", confidence="certain"),
        ),
        lost={1: 29},
        dropped=[micro, sample, sample],
        redone=[(FORM,), (FORM,), (ISLAND,)],
        kept=(ISLAND,),
        ended="ended early",
        folders=[("", ".nanstop")],
    )
    assert line == (
        "60 updates of several optimizers watched, 2 incidents (NS501, NS201, 30 times) and "
        "1 warning (NS102), 29 of 30 updates of one optimizer skipped "
        "(they trained nothing), 1 micro-batch and 2 samples of the data left out, "
        "ended early; 2 steps run again under: compute `a.py:3` in log space; "
        "kept finite by: keep `norm` in float32; "
        "details: `nanstop report .nanstop`"
    )


def test_a_folder_is_said_as_it_is_typed():
    line = ended(
        steps={1: 3}, failures={"0000": 1}, codes=("NS204",), folders=[("", "my runs/it's")]
    )
    command = line.partition("details: ")[2].strip("`")
    assert shlex.split(command) == ["nanstop", "report", "my runs/it's"]


def test_where_another_rank_keeps_its_incidents_is_said():
    line = ended(steps={1: 3}, failures={"0000": 1}, folders=[("", "out"), ("node2", "/there")])
    assert line.endswith("details: `nanstop report out`; details on node2: `nanstop report /there`")


@pytest.mark.parametrize("machine", ["", "another"])
def test_an_incident_that_is_not_in_the_own_folder_is_where_its_rank_keeps_it(tmp_path, machine):
    there, shared, met = Store(tmp_path / "there"), Store(tmp_path / "shared"), report()
    for store in (there, shared):
        store.open_incident()
        store.write_report(met)
    name = met.incident.id
    kept_in = f"{machine or platform.node()}:{there.folder}"
    end = RunEnd(failures={name: 1}, kept_in={name: kept_in})
    found = folders_of(end, [met], Store(tmp_path / "here"))
    assert found == [(machine, str(there.folder) if machine else short(there.folder))]
    for own in (there, shared):
        assert folders_of(end, [met], own) == [("", short(own.folder))]


def test_a_run_that_lost_every_update_says_that_nothing_was_trained():
    line = ended(steps={1: 15}, failures={"0000": 15}, codes=("NS204",), lost={1: 15})
    assert line.startswith("nothing was trained: all 15 updates were skipped; 15 steps watched, ")


def test_a_listed_run_that_trained_nothing_did_not_end_well():
    run = RunEnd(steps={1: 3, 2: 3})
    assert run.trains_nothing({1: 3, 2: 3})
    assert not run.trains_nothing({1: 3})
    assert not run.trains_nothing({})
    row = summary_row(report("0000"))
    summary = Summary(incidents=(row,), exit=0, steps=3, ended="clean", trained_nothing=True)
    assert totals(summary) == "3 steps in 0 s, nothing was trained, 1 incident"
    assert "stopped by nanstop, nothing was trained" in totals(replace(summary, ended="stopped"))


def test_what_failed_is_no_warning_beside_it():
    met = report("0000")
    best = met.diagnoses[0]
    run = RunEnd(steps={1: 3}, failures={"0000": 1})
    run.met([met], ())
    run.findings = (best,)
    assert "1 incident (NS201)" in end_line(run)
    assert "warning" not in end_line(run)
    run.findings = (replace(best, title="another"),)
    assert "and 1 warning (NS201)" in end_line(run)


def test_one_of_several_optimizers_that_trained_nothing_comes_first():
    line = ended(steps={1: 15, 2: 15}, failures={"0000": 15}, codes=("NS204",), lost={2: 15})
    assert line.startswith("one optimizer has trained nothing: all its 15 updates skipped; 30 ")


def test_what_many_optimizers_lost_is_added_up():
    steps, lost = dict.fromkeys(range(1, 7), 10), {1: 5, 2: 7, 3: 1, 4: 10, 5: 10}
    line = ended(steps=steps, failures={"0000": 33}, codes=("NS404",), lost=lost)
    assert line.startswith(
        "2 optimizers have trained nothing: all their 20 updates skipped; 60 updates of several "
        "optimizers watched, 1 incident (NS404, 33 times), 13 of 30 updates of 3 optimizers "
        "skipped (they trained nothing)"
    )


@pytest.mark.parametrize("times", [1, 2, 9, 10, 11, 20, 100, 110, 1000])
def test_an_incident_that_comes_again_is_told_at_powers_of_ten(times):
    assert bool(said_again(report("0003"), times)) == (times in (10, 100, 1000))
