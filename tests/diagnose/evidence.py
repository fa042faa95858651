"""Small pieces of evidence, as literals, for the tests of the rules."""

import math

from nanstop.records import (
    BatchFact,
    CheckpointScan,
    CoarseRow,
    DriftRow,
    Environment,
    Evidence,
    FailureKey,
    FormatFit,
    GradientRow,
    GradientTally,
    Incident,
    Localization,
    LogitGap,
    ObjectiveRow,
    OpEvent,
    OptimizerFacts,
    ParamGroup,
    Probe,
    RunFacts,
    Series,
    Signal,
    StateRow,
    StepId,
    StepPerRate,
    TensorScan,
    TensorStats,
    UpdateRow,
)

NAN_LOSS = Signal(source="loss", value=math.nan)


def stats(dtype="float16", **fields):
    return TensorStats(**({"shape": (4,), "dtype": dtype, "absmax": 100.0} | fields))


def event(dtype="float16", phase="forward", module="model.layers.1.mlp", **fields):
    """An op that made +Inf out of finite inputs, unless ``bad`` says otherwise."""
    bad = fields.pop("bad", {"posinf": 2})
    settings = {
        "index": 1,
        "phase": phase,
        "op": "aten.mul.Tensor",
        "module": module,
        "inputs": (stats(dtype),),
        "outputs": (stats(dtype, **bad),),
    }
    return OpEvent(**(settings | fields))


def localization(first_bad=None, origin="born_here", phase=None, **fields):
    phase = phase or (first_bad.phase if first_bad else "forward")
    key = FailureKey(kind="nan", phase=phase)
    return Localization(**({"key": key, "first_bad": first_bad, "origin": origin} | fields))


def incident(facts=None, signals=(NAN_LOSS,), **fields):
    settings = {
        "id": "0001",
        "at": StepId(run="r", step=3, micro=1),
        "phase": "forward",
        "environment": Environment(nanstop="0", python="3"),
    }
    return Incident(**(settings | {"facts": facts or RunFacts(), "signals": signals} | fields))


def evidence(found=None, facts=None, batch=(), **fields):
    """Evidence of an incident with this localization."""
    incident_fields = {
        name: fields.pop(name)
        for name in ("signals", "bad_params", "at", "odd_weights", "lost_moments")
        if name in fields
    }
    met = incident(facts, batch=tuple(batch), **incident_fields)
    return Evidence(incident=met, localization=found, **fields)


def group(dtype, *names, trainable=True):
    return ParamGroup(
        dtype=dtype, trainable=trainable, num_tensors=len(names), num_elements=64, examples=names
    )


def half_head(eps=1e-8, dtype="float16", **optimizer):
    settings = {"name": "AdamW", "lr": 1e-3, "eps": eps, "per_rate": StepPerRate(length=1.0)}
    settings |= optimizer
    return RunFacts(
        param_groups=(
            group("float16", "base.weight", trainable=False),
            group(dtype, "score.weight"),
        ),
        optimizer=OptimizerFacts(**settings),
    )


def batch_fact(name="input_ids", dtype="int64", micro=1, **fields):
    return BatchFact(micro=micro, name=name, shape=(2, 8), dtype=dtype, **fields)


def series(name, values, steps=None):
    return Series(name=name, steps=tuple(steps or range(len(values))), values=tuple(values))


def ended(kind, *signals, op=None):
    """Evidence of a process that died:
    (name, message) of its "exit" signals, and its last operation.
    """
    key = FailureKey(
        kind=kind, phase="forward", op=op.op if op else "", module=op.module if op else ""
    )
    found = Localization(key=key, first_bad=None, origin="unknown", growth=(op,) if op else ())
    told = tuple(Signal(source="exit", name=name, message=message) for name, message in signals)
    return Evidence(incident=incident(signals=told), localization=found)


def probed(facts=None, **fields):
    """Evidence of a probe and nothing else."""
    found = Probe(at=StepId(run="r", step=0), num_micro=1, **fields)
    return Evidence(facts=facts or RunFacts(), probe=found)


def objective_row(given="probabilities", op="aten._log_softmax.default", width=10):
    return ObjectiveRow(op=op, module="head", given=given, width=width, line="train.py:7: x")


def update_row(num_lost, dtype="bfloat16"):
    return UpdateRow(parameter="q.weight", dtype=dtype, num_lost=num_lost, num_total=1000)


def state_row(num_vanished, dtype="float16"):
    return StateRow(parameter="q.weight", dtype=dtype, num_vanished=num_vanished, num_total=1000)


def gradient_row(num_flushed, dtype="float16"):
    return GradientRow(
        parameter="q.weight",
        dtype=dtype,
        absmax=1e-9,
        num_nonzero=1000,
        num_flushed=num_flushed,
    )


def coarse_row(op, error):
    return CoarseRow(module="rotary", op=op, dtype="bfloat16", absmax=512.0, error=error)


def logit_gap(logprob_mean):
    return LogitGap(logprob_max=1.0, logprob_mean=logprob_mean)


def setup(**fields):
    """Standing facts, and a machine where ``capability`` is given: what is known before a run."""
    capability = fields.pop("capability", None)
    machine = Environment(nanstop="0", python="3", capability=capability) if capability else None
    return Evidence(facts=RunFacts(**fields), environment=machine)


def drift_row():
    return DriftRow(module="norm", op="aten.sub.Tensor", dtype="bfloat16", before=4e-3, after=5.9)


def zeros(name, shape=(4, 4)):
    """The range of a weight that is all zero."""
    return stats("float32", name=name, shape=shape, absmax=0.0, zeros=math.prod(shape))


def stored(found, overflow=0):
    """A tensor of a scanned checkpoint, of which float16 cannot hold ``overflow`` values."""
    fit = FormatFit(format="float16", headroom_bits=1.0, overflow=overflow)
    return TensorScan(name=found.name, file="model.safetensors", stats=found, fits=(fit,))


def scanned(*tensors, **fields):
    files = ("model.safetensors",)
    return CheckpointScan(
        path="m", kind="model", files=files, num_bytes=8, tensors=tensors, **fields
    )


def sum_of_masks(**fields):
    """An addition of finite masks whose result is -inf in three whole rows."""
    settings = {
        "op": "aten.add.Tensor",
        "inputs": (stats(absmax=65504.0), stats(absmax=65504.0)),
        "bad": {"neginf": 12},
        "wider": "finite",
        "fully_masked_rows": 3,
    }
    return event(**(settings | fields))


def bad_gradients(num_bad, num_zero=0, num_inf=0, num_total=5, norm=math.nan):
    """The sentinel's signal that some gradients of a window were not finite."""
    tally = GradientTally(num_total=num_total, num_bad=num_bad, num_inf=num_inf, num_zero=num_zero)
    return Signal(source="grad", name="w", value=norm, gradients=tally)


def climbing(losses, norms=(), found=None, facts=None, **fields):
    """Evidence of an overflow in the step after these losses and gradient norms."""
    histories = (series("loss_raw", losses), series("grad_norm", norms))
    at = StepId(run="r", step=len(losses), micro=0)
    return evidence(found, facts, at=at, series=histories, **fields)
