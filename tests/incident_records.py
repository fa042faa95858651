"""A report as literals, for whoever stores or shows one."""

import math

from nanstop.records import (
    Action,
    Atom,
    AuditEntry,
    Diagnosis,
    Environment,
    FailureKey,
    Incident,
    Localization,
    OpEvent,
    Proof,
    Report,
    RunFacts,
    Signal,
    SourceLine,
    StepId,
    TensorStats,
)

AT = StepId(run="r", step=412, micro=3)
ISLAND = Atom(remedy="island", target="model.layers.2.norm", value="float32")


def report(incident_id="0000", *, at=AT, snapshot=None, value=math.nan):
    incident = Incident(
        id=incident_id,
        at=at,
        phase="forward",
        signals=(Signal(source="loss", value=value, at=at),),
        facts=RunFacts(host="Trainer"),
        environment=Environment(nanstop="0", python="3"),
        snapshot=snapshot,
    )
    event = OpEvent(
        index=0,
        phase="forward",
        op="aten.mul.Tensor",
        module="model.layers.2.norm",
        source=SourceLine(file="modeling.py", line=149, function="forward"),
        outputs=(TensorStats(shape=(2, 4), dtype="float16", posinf=1, first_bad=(0, 1)),),
    )
    key = FailureKey(kind="+inf", phase="forward", op=event.op, module=event.module)
    return Report(
        incident=incident,
        localization=Localization(key=key, first_bad=event, origin="born_here"),
        diagnoses=(
            Diagnosis(code="NS201", title="overflow", cause="too large", confidence="certain"),
            Diagnosis(code="NS101", title="narrow", cause="bf16 model", confidence="likely"),
        ),
        proof=Proof(incident=incident_id, verdict="proven", minimal=(ISLAND,)),
        audit=(AuditEntry(at=at, action=Action(kind="redo", atoms=(ISLAND,))),),
        count=2,
    )
