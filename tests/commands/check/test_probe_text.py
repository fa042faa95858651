"""A probe in at most a screen of lines, the narrowest place first."""

from nanstop.commands.check.probe_text import render_probe
from nanstop.records import LogitGap, Probe, RangeRow, StepId, UpdateRow
from nanstop.records.codec import from_json, to_json

AT = StepId(run="r", step=0)


def row(bits, module="model.layers.0.mlp", **fields):
    settings = {"op": "aten.mul.Tensor", "dtype": "float16", "absmax": 3.0} | fields
    return RangeRow(module=module, headroom_bits=bits, **settings)


def test_worst_rows_then_a_count():
    rows = tuple(row(float(bits), module=f"m{bits}") for bits in range(-2, 30))
    lines = render_probe(Probe(at=AT, num_micro=2, loss_scale=1024.0, ranges=rows)).splitlines()
    assert lines[0] == "probe: 2 micro-batches, loss scale 1024"
    assert lines[3].split() == ["-2.0", "bits", "3", "float16", "forward", "m-2", "mul"]
    assert lines[-1] == "and 20 with 10.0 bits or more"
    assert len(lines) == 16


def test_a_run_with_room_everywhere_needs_no_table():
    text = render_probe(Probe(at=AT, num_micro=1, ranges=(row(126.0, dtype="bfloat16"),)))
    assert text.splitlines()[1:] == [
        "  every value has 126.0 bits or more to the end of its format"
    ]


def test_what_is_lost_is_said_in_numbers():
    update = UpdateRow(parameter="w", dtype="bfloat16", num_lost=984, num_total=1000)
    gap = LogitGap(num_tokens=4, logit_max=0.5, logit_mean=0.1, logprob_max=0.2, logprob_mean=0.05)
    half = row(100.0, dtype="bfloat16")
    text = render_probe(
        Probe(
            at=AT,
            num_micro=1,
            lr=1e-6,
            updates=(update,),
            logits=gap,
            ranges=(half,),
            problems=("logits: x",),
        )
    )
    assert "updates: 98 % lost to rounding (bfloat16 at learning rate 1e-06)" in text
    assert "log-probabilities 0.05 and 0.2" in text
    assert text.endswith("not measured: logits: x")


def test_no_line_is_wider_than_asked():
    name = "model.layers.11.self_attn.a_very_long_projection_of_something"
    text = render_probe(Probe(at=AT, num_micro=1, ranges=(row(1.0, module=name),)), width=70)
    assert max(map(len, text.splitlines())) <= 70
    assert "…" not in text


def test_json_and_back():
    probe = Probe(at=AT, num_micro=1, loss=float("nan"), ranges=(row(float("inf")),))
    assert repr(from_json(Probe, to_json(probe))) == repr(probe)
