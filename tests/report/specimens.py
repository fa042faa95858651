"""Records as literals: the Gemma3 incident of the design, and what varies from it."""

from dataclasses import replace

from nanstop.records import (
    Action,
    Alternative,
    Atom,
    AuditEntry,
    Diagnosis,
    Environment,
    FailureKey,
    Incident,
    Localization,
    OpEvent,
    Position,
    Proof,
    Reference,
    Replay,
    Report,
    RunFacts,
    Signal,
    SourceLine,
    StepId,
    TensorStats,
    Trial,
)

AT = StepId(run="r", step=412, micro=3, rank=0)
MODULE = "model.layers.2.post_feedforward_layernorm"
ISLAND = (Atom(remedy="island", target=MODULE, value="float32"),)
BF16 = (Atom(remedy="bf16"),)

INCIDENT = Incident(
    id="0007",
    at=AT,
    phase="forward",
    signals=(Signal(source="loss", value=float("nan"), at=AT),),
    facts=RunFacts(host="DPOTrainer", autocast="float16", model_type="gemma3_text"),
    environment=Environment(nanstop="0.1.0", python="3.11.2"),
)

EVENT = OpEvent(
    index=904,
    phase="forward",
    op="aten._to_copy.default",
    module=MODULE,
    source=SourceLine(
        file="/x/transformers/models/gemma3/modeling_gemma3.py",
        line=149,
        function="forward",
        text="return output.type_as(x)",
    ),
    inputs=(TensorStats(shape=(2, 32, 64), dtype="float32", absmax=214323.0),),
    outputs=(TensorStats(shape=(2, 32, 64), dtype="float16", posinf=833, absmax=65000.0),),
    wider="finite",
)

GROWTH = OpEvent(
    index=890,
    phase="forward",
    op="aten.mul.Tensor",
    module="model.layers.2.mlp",
    inputs=(TensorStats(shape=(2, 32, 64), dtype="float16", absmax=100.0),),
    outputs=(TensorStats(shape=(2, 32, 64), dtype="float16", absmax=6000.0),),
)

LOCALIZATION = Localization(
    key=FailureKey(kind="+inf", phase="forward", op="aten._to_copy.default", module=MODULE),
    first_bad=EVENT,
    origin="born_here",
    reaches=("loss",),
    growth=(GROWTH,),
    positions=(Position(sample=1, first_token=17, last_token=24),),
)

DIAGNOSIS = Diagnosis(
    code="NS201",
    title="float16 overflow in `_to_copy`",
    cause="born here: every input was finite and so is the result in float32; float16 ends at "
    "65504",
    confidence="certain",
    lines=("range grew x60 at model.layers.2.mlp",),
    remedies=(ISLAND, BF16),
    where=MODULE,
)


def trial(atoms, outcome, gap=None):
    return Trial(atoms=atoms, outcome=outcome, loss_gap=gap, grad_cosine=0.99999)


PROOF = Proof(
    incident="0007",
    verdict="proven",
    minimal=ISLAND,
    baseline=trial((), "same_failure"),
    passing=(trial(ISLAND, "pass", 1e-6), trial(ISLAND, "pass", -4e-7), trial(ISLAND, "pass", 0.0)),
    ablations=(trial((), "same_failure"),) * 3,
    alternatives=(Alternative(atoms=BF16, safety="changes_training", passed=3, runs=3),),
    reference=Reference(outcome="pass", loss=0.69, loss_tolerance=1e-4),
    cost="+0.6 % step time",
)

REPORT = Report(
    incident=INCIDENT,
    replay=Replay(incident="0007", fidelity="bitwise", runs=2, loss=float("nan")),
    localization=LOCALIZATION,
    diagnoses=(DIAGNOSIS,),
    proof=PROOF,
    audit=(
        AuditEntry(
            at=AT,
            action=Action(kind="redo", atoms=ISLAND, reason="no step lost", proof="0007"),
            incident="0007",
        ),
    ),
)

UNSOLVED = replace(
    REPORT,
    localization=replace(LOCALIZATION, positions=None, blind_spots=("one fused kernel",)),
    diagnoses=(
        replace(DIAGNOSIS, confidence="likely", accompanied_by=("NS101",)),
        Diagnosis(
            code="NS101",
            title="float16 is too narrow for this model",
            cause="models of type gemma3_text exceed float16",
            confidence="likely",
        ),
    ),
    proof=Proof(
        incident="0007",
        verdict="none_found",
        minimal=(),
        tried=(trial(ISLAND, "same_failure"), trial(BF16, "oom")),
        next_experiment="give the trials more memory",
    ),
    audit=(),
    count=7,
    failures=("reference: out of memory",),
)

FINDING = Diagnosis(
    code="NS102",
    title="trainable parameters stored in float16",
    cause="the optimizer's eps 1e-08 rounds to 0 in float16: updates divide by zero",
    confidence="certain",
    lines=("1 tensor: `score.modules_to_save.default.weight`",),
    remedies=((Atom(remedy="fp32_trainables"),),),
    where="score.modules_to_save.default.weight",
)

UPDATE = Report(
    incident=replace(INCIDENT, phase="optimizer", at=StepId(run="r", step=0)),
    replay=Replay(incident="0007", fidelity="same_failure", runs=1, digest="5f3a"),
    localization=Localization(
        key=FailureKey(kind="nan", phase="optimizer", op="aten.addcdiv_.default"),
        first_bad=OpEvent(
            index=12,
            phase="optimizer",
            op="aten.addcdiv_.default",
            module="",
            inputs=(
                TensorStats(shape=(1, 64), dtype="float16", absmax=0.02, name="score.weight"),
                TensorStats(shape=(1, 64), dtype="float16", absmax=1e-05),
                TensorStats(shape=(1, 64), dtype="float16", zeros=64),
            ),
            outputs=(TensorStats(shape=(1, 64), dtype="float16", nan=3, neginf=61),),
        ),
        origin="born_here",
        reaches=("score.weight",),
    ),
    diagnoses=(
        Diagnosis(
            code="NS402",
            title="the update broke `score.weight`",
            cause="AdamW's eps 1e-08 rounds to 0 in float16: the update is m / (sqrt(v) + 0)",
            confidence="certain",
            lines=("gradients were finite; 1 parameter not finite after the update",),
            remedies=((Atom(remedy="fp32_trainables"),), (Atom(remedy="lr", value="0.1"),)),
            where="score.weight",
            accompanied_by=("NS102",),
        ),
        FINDING,
    ),
)
