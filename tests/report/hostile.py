"""Runs that do their worst to whoever shows them."""

import math
from dataclasses import fields, is_dataclass, replace

from nanstop.records import Position, Report, Series
from nanstop.report.html.run_record import RunRecord
from report.specimens import AT, GROWTH, INCIDENT, LOCALIZATION, REPORT

MARKUP = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\x00\u202e"
FIXED = ("fidelity", "verdict", "kind", "outcome", "confidence", "phase", "dtype", "remedy", "id")
STEPS = tuple(range(100_000))


def spoiled(value, text=MARKUP):
    """A record with a text behind each of its own that is no word of a fixed vocabulary."""
    if isinstance(value, str):
        return value + text
    if isinstance(value, tuple):
        return tuple(spoiled(each, text) for each in value)
    if is_dataclass(value):
        names = (f.name for f in fields(value) if f.name not in (*FIXED, "origin"))
        return replace(value, **{name: spoiled(getattr(value, name), text) for name in names})
    return value


def series(name, value):
    return Series(name=name, steps=STEPS, values=tuple(value(step) for step in STEPS))


def large():
    """40 incidents with 2,000 layers whose names are markup, in 100,000 steps."""
    deep = ".".join(f"layers{i}" for i in range(500))
    growth = tuple(replace(GROWTH, module=f"model.layers.{i}.mlp") for i in range(2000))
    found = replace(
        LOCALIZATION,
        growth=(replace(GROWTH, module=deep), *growth),
        positions=tuple(Position(sample=row) for row in range(5000)),
    )
    report = spoiled(replace(REPORT, localization=found))
    reports = tuple(
        replace(report, incident=replace(report.incident, id=f"{i:04d}", at=replace(AT, step=i)))
        for i in range(40)
    )
    sizes = (1.0, 2.0, 1e4, 6e4, 1e9, math.inf)
    ranges = (
        Series(name=f"range {i:04d} layers.{i}{MARKUP}", steps=(0, 1, 2, 4, 8, 16), values=sizes)
        for i in range(2000)
    )
    return RunRecord(
        reports=reports,
        series=(
            series("loss_raw", lambda step: math.sin(step) + 2),
            series("loss_logged", lambda _: 2.0),
            series("grad_norm", lambda step: 10.0 ** (step % 9)),
            series("scale", lambda step: 2.0 ** (step % 16)),
            series("lr", lambda _: 1e-4),
            *ranges,
        ),
    )


def not_finite():
    """Nothing that was noted is finite."""
    names = ("loss_raw", "grad_norm", "scale", "lr", "range 0000 model")
    worst = (math.nan, math.inf, -math.inf)
    noted = tuple(series(name, lambda step: worst[step % 3]) for name in names)
    return RunRecord(reports=(REPORT,), series=noted)


def extreme():
    """The largest and the smallest numbers there are, and steps beyond all counting."""
    return RunRecord(
        reports=(REPORT,),
        series=(
            series("loss_raw", lambda step: (1.7e308, -1.7e308)[step % 2]),
            series("grad_norm", lambda step: (5e-324, 1.7e308)[step % 2]),
            series("scale", lambda _: 0.0),
            Series(name="lr", steps=(-5, 10**30), values=(1.0, -0.0)),
        ),
    )


def empty():
    """An incident of which nothing is known, in a run of zero steps."""
    return RunRecord(
        reports=(Report(incident=INCIDENT),),
        series=(Series(name="loss_raw", steps=(), values=()),),
    )


RUNS = {"large": large, "not finite": not_finite, "extreme": extreme, "empty": empty}
