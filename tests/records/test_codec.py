import json
import math
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from nanstop import records
from nanstop.errors import NanstopError
from nanstop.records import Atom, Evidence, Report, Series, Trial, codec
from nanstop.records.codec import from_json, schema, to_json
from report.specimens import ISLAND, REPORT, UNSOLVED, UPDATE
from versions import needs

DOCS = Path(__file__).parents[2] / "docs"


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 2.0**-149, 2.0**-24, 1.7e308, 0.1]
)
def test_float_keeps_its_bits(value):
    back = from_json(Series, to_json(Series(name="loss_raw", steps=(0,), values=(value,))))
    assert math.isnan(back.values[0]) if math.isnan(value) else bits(back.values[0]) == bits(value)


@given(st.lists(st.floats(allow_nan=False, width=64)))
def test_any_float_keeps_its_bits(values):
    series = Series(name="s", steps=tuple(range(len(values))), values=tuple(values))
    back = from_json(Series, to_json(series))
    assert [bits(value) for value in back.values] == [bits(value) for value in values]


@pytest.mark.parametrize("report", [REPORT, UNSOLVED, UPDATE], ids=["proven", "unsolved", "update"])
def test_report_is_the_same_after_a_round_trip(report):
    text = to_json(report)
    back = from_json(Report, text)
    assert to_json(back) == text
    assert back.localization == report.localization
    assert back.diagnoses == report.diagnoses
    assert isinstance(back.diagnoses, tuple)
    assert math.isnan(back.incident.signals[0].value)


def test_json_is_plain():
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    json.loads(to_json(REPORT), parse_constant=refuse)


@pytest.mark.parametrize("report", [REPORT, UNSOLVED, UPDATE], ids=["proven", "unsolved", "update"])
def test_what_is_written_is_what_the_schema_says(report):
    dumped = TypeAdapter(Report).dump_json(report)
    assert list(json.loads(to_json(report))) == list(json.loads(dumped))
    assert json.loads(to_json(report)) == json.loads(dumped)


def test_half_a_surrogate_pair_is_written_as_a_question_mark():
    back = from_json(Atom, to_json(Atom(remedy="fp32_island", target="a\udc80b")))
    assert back.target == "a?b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^Trial: invalid JSON"),
        (
            '{"atoms": [{"remedy": 1}], "outcome": "pass"}',
            r"^Trial\.atoms\[0\]\.remedy: input should",
        ),
        ('{"atoms": [], "outcome": "won"}', r"^Trial\.outcome: input should be 'pass'"),
        ('{"atoms": [], "outcome": "pass", "colour": 1}', r"^Trial\.colour: unexpected keyword"),
        ('{"outcome": "pass"}', r"^Trial\.atoms: "),
        ("[" * 100_000, r"^Trial: "),
    ],
)
def test_bad_text_is_refused_with_its_key_path(text, message):
    with pytest.raises(NanstopError) as caught:
        from_json(Trial, text)
    assert caught.value.code == "NS001"
    assert re.search(message, caught.value.message)


def test_long_text_is_refused_unread(monkeypatch):
    monkeypatch.setattr(codec, "MAX_CHARS", 10)
    with pytest.raises(NanstopError, match="longer than"):
        from_json(Trial, '{"atoms": [], "outcome": "pass"}')


def test_nested_union_reads_back_the_same_class():
    evidence = Evidence(trials=(Trial(atoms=ISLAND, outcome="pass", loss=math.nan),))
    back = from_json(Evidence, to_json(evidence))
    assert back.trials[0].atoms == ISLAND
    assert math.isnan(back.trials[0].loss)


@needs("pydantic", "2.14", "what the records say of themselves is part of the schema")
def test_published_schema_is_up_to_date():
    published = json.loads((DOCS / "report.schema.json").read_text(encoding="utf-8"))
    assert published == schema(), "run `python tools/generate_docs.py`"


def test_schema_names_every_record_of_a_report():
    definitions = schema()["$defs"]
    assert set(definitions) >= {"Incident", "Localization", "Proof", "Diagnosis", "AuditEntry"}
    for name in definitions:
        assert definitions[name].get("additionalProperties") is False, name
        assert hasattr(records, name)


def test_schema_allows_the_strings_of_non_finite_numbers():
    loss = schema(Trial)["properties"]["loss"]
    assert "NaN" in json.dumps(loss)
