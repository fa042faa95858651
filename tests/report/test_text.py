import io
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from nanstop.records import (
    Atom,
    BatchFact,
    BatchRows,
    Diagnosis,
    OpEvent,
    Position,
    Proof,
    Reference,
    Report,
    Sighting,
    TensorStats,
)
from nanstop.report.text.terminal import render, render_finding
from nanstop.report.text.wrapping import in_columns
from report.renderings import SNAPSHOTS, renderings
from report.specimens import (
    DIAGNOSIS,
    EVENT,
    INCIDENT,
    ISLAND,
    LOCALIZATION,
    PROOF,
    REPORT,
    UNSOLVED,
    trial,
)

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", sorted(renderings()))
def test_rendering_is_the_reviewed_one(name):
    assert renderings()[name] + "\n" == (SNAPSHOTS / name).read_text(encoding="utf-8")


def test_no_snapshot_is_left_over():
    assert {path.name for path in SNAPSHOTS.iterdir()} == set(renderings())


@pytest.mark.parametrize("report", [REPORT, UNSOLVED], ids=["proven", "unsolved"])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_word_is_lost_by_wrapping(report, width):
    assert render(report, width=width).split() == render(report).split()


def test_lines_fit_the_width_where_words_allow_it():
    for line in render(UNSOLVED, width=80).splitlines():
        assert len(line) <= 80


@pytest.mark.skipif(sys.platform == "win32", reason="has no such terminals")
def test_the_width_is_that_of_the_terminal_that_is_written_to(monkeypatch):
    import fcntl
    import pty
    import struct
    import termios

    monkeypatch.delenv("COLUMNS", raising=False)
    inner, outer = pty.openpty()
    fcntl.ioctl(outer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 47, 0, 0))
    with os.fdopen(inner, "rb"), os.fdopen(outer, "w", encoding="utf-8") as terminal:
        lines = ANSI.sub("", render(UNSOLVED, stream=terminal)).splitlines()
    assert 40 < max(map(len, (line for line in lines if len(line.split()) > 3))) <= 47


def test_lines_that_are_too_long_are_broken_below_their_last_column():
    line = "  NaN loss   REACHES THE WEIGHTS: 1348 weights are not finite"
    assert in_columns(line, 40) == [
        "  NaN loss   REACHES THE WEIGHTS:",
        " " * 13 + "1348 weights are not finite",
    ]
    assert in_columns("  " + "word " * 9, 24) == [
        "  word word word word",
        *["    word word word word"],
        "    word",
    ]
    assert in_columns(line, 80) == [line]


def test_colour_changes_no_character():
    coloured = render(REPORT, width=80, color=True)
    assert "\x1b[" in coloured
    assert ANSI.sub("", coloured) == render(REPORT, width=80)


def test_plain_and_unwrapped_when_not_a_terminal():
    assert "\x1b[" not in render(REPORT)
    assert len(render(REPORT).splitlines()) == 12


def test_incident_alone_is_rendered():
    text = render(Report(incident=INCIDENT))
    assert text.startswith("error[NS000]: not diagnosed, forward, step 412, micro-batch 3\n")


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ((Position(sample=0, first_token=5, last_token=5),), "sample 0 token 5"),
        ((Position(sample=2),), "= sample 2\n"),
        (tuple(Position(sample=i) for i in range(6)), "sample 3; 2 more samples"),
        (None, "which sample it is, is not known"),
    ],
)
def test_positions_are_said_and_never_guessed(positions, said):
    assert said in render(replace(REPORT, localization=replace(LOCALIZATION, positions=positions)))


@pytest.mark.parametrize("origin", ["from_constant", "from_buffer", "carried_over", "from_param"])
def test_no_row_is_named_where_none_is_to_blame(origin):
    positions = tuple(Position(sample=i) for i in range(6))
    held = replace(LOCALIZATION, origin=origin, positions=positions, in_every_sample=True)
    assert "sample" not in render(replace(REPORT, localization=held)).partition("help:")[0]
    of_all = replace(held, origin="born_here")
    assert "= every sample of the micro-batch has it\n" in render(
        replace(REPORT, localization=of_all)
    )


def test_one_row_is_known_and_what_confirms_says_nothing_twice():
    rows = BatchRows(data="the data set", rows=(64,), in_order=False)
    met = replace(REPORT.incident, rows=rows)
    unknown = replace(LOCALIZATION, positions=None)
    best = replace(REPORT.diagnoses[0], cause="n - 1 = 0", confirmed="its own shape: n - 1 = 0")
    text = render(replace(REPORT, incident=met, localization=unknown, diagnoses=(best,)))
    assert "not known" not in text
    assert "the micro-batch was made of row 64 of the data set\n" in text
    assert "= confirmed: its own shape\n" in text


def test_where_no_sample_has_a_label_none_is_asked_for():
    fact = BatchFact(micro=3, name="labels", shape=(2, 4), dtype="int64", num_supervised=0)
    unknown = replace(LOCALIZATION, positions=None)
    for micro, is_said in ((3, False), (2, True)):
        met = replace(REPORT.incident, batch=(replace(fact, micro=micro),))
        text = render(replace(REPORT, incident=met, localization=unknown))
        assert ("not known" in text) is is_said


def test_a_number_of_the_program_is_no_matter_of_a_sample():
    event = replace(LOCALIZATION.first_bad, op="aten.div.Scalar", scalars=(0.0,))
    unknown = replace(LOCALIZATION, positions=None, first_bad=event)
    assert "not known" not in render(replace(REPORT, localization=unknown))
    event = replace(event, scalars=(2.0,))
    other = replace(unknown, first_bad=event)
    assert "which sample it is, is not known" in render(replace(REPORT, localization=other))


@pytest.mark.parametrize(
    ("module", "kind", "said"),
    [
        ("2", "Linear", "--> layer 2 of the model (Linear)"),
        ("body.2", "Linear", "--> body.2 (Linear)"),
        ("body.norm", "LayerNorm", "--> body.norm  "),
        ("2.weight", "", "--> 2.weight of the model"),
    ],
)
def test_a_name_that_is_a_number_is_said_as_a_layer(module, kind, said):
    event = replace(LOCALIZATION.first_bad, module=module, module_class=kind)
    text = render(replace(REPORT, localization=replace(LOCALIZATION, first_bad=event)))
    assert said in text


def test_a_table_that_is_too_wide_is_set_closer_and_no_number_is_cut_from_its_word():
    rows = [
        line
        for line in render(REPORT, width=60).splitlines()
        if line.startswith(("      input", "      output"))
    ]
    assert [row.index("float") for row in rows] == [14, 14]
    assert all(len(row) <= 60 for row in rows)
    folded = render(replace(REPORT, count=2), width=66).splitlines()
    assert not any(line.rstrip().endswith(("step", "micro-batch")) for line in folded)


def test_ablation_of_several_atoms_says_any_part():
    atoms = (*ISLAND, replace(ISLAND[0], target="lm_head"))
    proof = replace(PROOF, minimal=atoms, ablations=(trial(ISLAND, "same_failure"),) * 2)
    assert "without any part of it 2 of 2 fail" in render(replace(REPORT, proof=proof))


def test_proof_without_a_float32_reference_says_what_stood_in():
    passing = tuple(replace(one, rows_unchanged=True) for one in PROOF.passing)
    reference = Reference(outcome="same_failure")
    proof = replace(PROOF, verdict="plausible", passing=passing, reference=reference)
    text = render(replace(REPORT, proof=proof))
    assert "[plausible: with it 3 of 3 runs pass" in text
    assert "healthy rows unchanged" in text
    assert "of float32;" not in text


def test_empty_proof_says_that_nothing_was_tried():
    proof = Proof(incident="0007", verdict="none_found", minimal=())
    assert "no remedy could be tried" in render(replace(REPORT, proof=proof))


def test_untried_remedies_say_so_and_what_changes_training():
    text = render(replace(REPORT, proof=None))
    assert f"keep `{ISLAND[0].target}` in float32     [not tried]" in text
    assert (
        "or use bfloat16 in place of float16 for the whole run     [not tried; changes training]"
        in text
    )


def test_remedies_that_read_the_same_are_said_once():
    back = (replace(ISLAND[0], value="float32->input"),)
    diagnosis = replace(DIAGNOSIS, remedies=(back, ISLAND))
    text = render(replace(REPORT, proof=None, diagnoses=(diagnosis,)))
    assert text.count("help:") == 1


def test_only_an_overflowed_output_shows_its_limit():
    bad = TensorStats(shape=(2,), dtype="float16", nan=1)
    event = replace(EVENT, inputs=(replace(bad, posinf=1),), outputs=(bad,))
    assert "limit" not in render(
        replace(REPORT, localization=replace(LOCALIZATION, first_bad=event), diagnoses=())
    )


def test_many_inputs_are_cut_and_counted():
    inputs = tuple(TensorStats(shape=(i,), dtype="float16", absmax=float(i)) for i in range(9))
    event = replace(EVENT, inputs=inputs)
    text = render(replace(REPORT, localization=replace(LOCALIZATION, first_bad=event)))
    assert text.count("      input") == 5
    assert text.count("      output") == 1
    assert "and 4 more inputs" in text


def test_event_without_source_or_tensors():
    event = OpEvent(index=0, phase="loss", op="aten.log.default", module="")
    diagnoses = (replace(DIAGNOSIS, where=""),)
    localization = replace(LOCALIZATION, first_bad=event)
    text = render(replace(REPORT, localization=localization, diagnoses=diagnoses))
    assert "  --> outside any module\n  = born here" in text


def test_finding_without_place_or_remedy():
    finding = Diagnosis(code="NS802", title="loss of 0 by design", cause="c", confidence="possible")
    assert render_finding(finding).splitlines() == [
        "note[NS802]: loss of 0 by design",
        "  = c",
        "  = this finding is possible, not certain",
        "note: nanstop explain NS802",
    ]


@pytest.mark.parametrize(
    ("seen", "headline"),
    [
        (Sighting(step=3), "t, step 3"),
        (Sighting(step=0, micro=1, phase="forward"), "t, forward, step 0, micro-batch 1"),
    ],
)
def test_a_finding_that_was_measured_says_where_it_was_seen(seen, headline):
    finding = Diagnosis(code="NS209", title="t", cause="c", confidence="certain", seen=seen)
    assert render_finding(finding).splitlines()[0] == f"warning[NS209]: {headline}"


def test_rendering_needs_no_torch():
    code = (
        "import sys, nanstop.report.text.terminal, nanstop.records.codec; print('torch' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_stream_that_the_text_goes_to_says_whether_there_is_a_terminal():
    assert "\x1b[" in render(REPORT, stream=_Terminal())
    assert "\x1b[" not in render(REPORT, stream=io.StringIO())
    assert "\x1b[" in render_finding(DIAGNOSIS, stream=_Terminal())


def test_a_very_long_line_of_source_is_cut():
    source = replace(EVENT.source, text="x = " + "1 + " * 100 + "1")
    located = replace(LOCALIZATION, first_bad=replace(EVENT, source=source))
    line = render(replace(REPORT, localization=located)).splitlines()[2]
    assert line.endswith("1 + 1...")
    assert len(line) < 200


@pytest.mark.parametrize(
    ("outcome", "confidence", "is_said"),
    [
        ("not_applicable", "certain", True),
        ("not_applicable", "possible", False),
        ("same_failure", "certain", False),
    ],
)
def test_the_usual_cure_is_said_where_nothing_could_be_tried(outcome, confidence, is_said):
    proof = Proof(
        incident="0007", verdict="none_found", minimal=(), tried=(trial(ISLAND, outcome),)
    )
    known = replace(DIAGNOSIS, usual_cure="Mend the data.", confidence=confidence)
    shown = render(replace(REPORT, proof=proof, diagnoses=(known,)))
    assert ("help: the usual cure, not tried here: Mend the data." in shown) == is_said
    assert ("nothing that was tried cures it" in shown) == (outcome == "same_failure")


def test_the_usual_cure_is_said_where_only_another_number_was_read():
    """That asks whether the script leaves the entry out; nobody has tried to mend what made it."""
    read = Atom(remedy="finite_constant", target="train.py:3", value="0:weights")
    tried = (trial((read,), "same_failure"),)
    proof = Proof(incident="0007", verdict="none_found", minimal=(), tried=tried)
    known = replace(DIAGNOSIS, usual_cure="Mend the data.", confidence="certain")
    shown = render(replace(REPORT, proof=proof, diagnoses=(known,))).splitlines()
    first, second = [line for line in shown if line.startswith("help: ")][:2]
    assert first == "help: the usual cure, not tried here: Mend the data."
    assert second.startswith("help: nothing that was tried cures it: read a finite number at")


@pytest.mark.parametrize("verdict", ["isolated", "proven"])
def test_leaving_out_a_sample_is_not_all_that_is_said(verdict):
    """What has made the sample so fails again with the next one."""
    known = replace(DIAGNOSIS, usual_cure="Mend the data.")
    shown = render(replace(REPORT, proof=replace(PROOF, verdict=verdict), diagnoses=(known,)))
    said = "help: the usual cure, not tried here: Mend the data." in shown
    assert said == (verdict == "isolated")


@pytest.mark.parametrize(
    ("verdict", "gap", "cosine", "rows", "said"),
    [
        (
            "proven",
            2e-7,
            0.99999,
            None,
            "; loss within 2e-7 of float32, gradients in the same direction (cosine 0.99999)",
        ),
        ("isolated", 1.0, -0.29921, True, "; healthy rows unchanged]"),
        ("isolated", 1.0, -0.29921, None, "fail]"),
        ("isolated", 1e-6, -0.5, None, "fail]"),
        ("plausible", 0.7, 0.2, None, "; other numbers than in float32]"),
    ],
)
def test_only_what_is_near_exact_numbers_is_told_as_near(verdict, gap, cosine, rows, said):
    run = replace(trial(ISLAND, "pass", gap), grad_cosine=cosine, rows_unchanged=rows)
    proof = replace(PROOF, verdict=verdict, passing=(run,), cost="", alternatives=())
    shown = render(replace(REPORT, proof=proof))
    assert said in shown
    assert ("cosine" in shown) == (verdict == "proven")


@pytest.mark.parametrize("formats", [("float32",), ("float32", "float64")])
def test_an_exact_run_that_fails_is_what_was_seen_and_no_experiment(formats):
    text = f"{formats[-1]} fails too: no number format cures this"
    proof = replace(
        PROOF,
        verdict="none_found",
        minimal=(),
        next_experiment=text,
        reference=Reference(outcome="same_failure", fails_in=formats),
    )
    shown = render(replace(REPORT, proof=proof))
    assert f"help: {text}" in shown
    assert "next experiment" not in shown


def test_a_cure_of_lines_in_two_files_shows_both(tmp_path):
    (tmp_path / "one.py").write_text("import torch\ndef f(x, y):\n    return x / y\n")
    (tmp_path / "two.py").write_text("import torch\ndef g(x):\n    return torch.log(x)\n")
    forms = tuple(
        Atom(remedy="form", target=f"{tmp_path / name}.py:3", value=f"guarded:{op}")
        for name, op in (("one", "div"), ("two", "log"))
    )
    event = replace(EVENT, op="aten.div.Tensor", source=None, module="")
    report = replace(
        REPORT,
        localization=replace(LOCALIZATION, first_bad=event),
        proof=replace(PROOF, minimal=forms, alternatives=(), typed=None),
    )
    said = render(report, color=False, width=120)
    assert "in code: one.py:3" in said
    assert "in code: two.py:3" in said
    assert "return x / (y or 1)" in said
    assert "torch.log(x.clamp(min=" in said
    assert said.count("`nanstop fix") == 1
