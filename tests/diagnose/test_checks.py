"""Each rule says what it should on the evidence it is made for, and nothing on what is close to
it.
"""

import math
from dataclasses import replace

import pytest

from diagnose import account_cases, training_cases
from diagnose.evidence import (
    batch_fact,
    coarse_row,
    drift_row,
    ended,
    event,
    evidence,
    gradient_row,
    group,
    half_head,
    incident,
    localization,
    logit_gap,
    objective_row,
    probed,
    scanned,
    series,
    setup,
    state_row,
    stats,
    stored,
    update_row,
    zeros,
)
from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.diagnose import diagnose
from nanstop.diagnose.findings.gradients.ns302_loss_scale_collapse import consecutive_falls
from nanstop.records import (
    FORMAT_MAX,
    AccumulationFacts,
    AdapterFacts,
    Atom,
    BackwardRow,
    BatchFact,
    BatchRows,
    ClippingFacts,
    DataFacts,
    Environment,
    Evidence,
    FailureKey,
    GradientPath,
    HeadFacts,
    KeyProblem,
    ModeFacts,
    ObjectiveFacts,
    OptimizerFacts,
    Position,
    PrecisionFacts,
    QuantizedFacts,
    RangeRow,
    RateFacts,
    RatioRow,
    Replay,
    ReplicaFacts,
    ResumeFacts,
    RunFacts,
    ScheduleFacts,
    Series,
    Signal,
    SourceLine,
    StateFault,
    StepId,
    StepLength,
    StepPerRate,
    TokenRows,
    Trial,
)
from nanstop.records.facts import BY_HAND

RULES = {rule.code: rule for rule in CATALOGUE}
FP16 = RunFacts(autocast="float16")
EAGER = RunFacts(autocast="float16", attention="eager")
SDPA = RunFacts(attention="sdpa")
NOT_REPRODUCED = Replay(incident="0001", fidelity="not_reproduced", runs=2)


def check(code, given):
    return RULES[code].check(given)


def remedies(diagnosis):
    return [" + ".join(str(atom) for atom in atoms) for atoms in diagnosis.remedies]


def overflow(**fields):
    return event(**({"wider": "finite"} | fields))


ATTENTION = overflow(
    op="aten.bmm.default",
    module="model.layers.0.self_attn",
    source=SourceLine(file="m.py", line=1, function="eager_attention_forward"),
)
LARGE = stats("float32", name="w", absmax=1e34, absmin_nonzero=1e33)
MASKED = event(op="aten._softmax.default", fully_masked_rows=3, bad={"nan": 9}, dtype="float32")
HIDING = event(op="aten.add.Tensor", dtype="float32", inputs=(stats("float32"), stats("float32", neginf=4)))  # fmt: skip
LOG = event(op="aten.log.default", dtype="float32", wider="nonfinite", bad={"nan": 1})
COUNT = event(op="aten.div.Tensor", dtype="float32", wider="nonfinite", bad={"nan": 1}, inputs=(stats("float32", shape=()), stats("float32", shape=(), absmax=0.0, zeros=1)), descent=(("parameter",), ("count", "ids")))  # fmt: skip
NO_TOKEN = replace(COUNT, descent=(("log_probability", "parameter"), ("count", "ids")))
NONE_KEPT = batch_fact("kept", minimum=0.0, maximum=0.0)
COUNTS = event(op="aten.div.Tensor", dtype="float32", wider="nonfinite", bad={"nan": 1}, inputs=(stats("float32"), stats("int64", zeros=1)), descent=(("parameter",), ("count", "ids")))  # fmt: skip
EMPTY_SUM = event(op="aten.div.Tensor", dtype="float32", wider="nonfinite", bad={"nan": 1}, inputs=(stats("float32", shape=()),), scalars=(0.0,), descent=(("data", "empty"),))  # fmt: skip
INVERSE_COUNTS = event(op="aten.reciprocal.default", dtype="float32", wider="nonfinite", inputs=(stats("float32", zeros=1),), descent=(("count", "data"),))  # fmt: skip
HANDED_ON = event(op="aten.mul.Tensor", dtype="float32", wider="nonfinite", bad={"nan": 1}, inputs=(stats("float32", shape=(), nan=1),))  # fmt: skip
NORMS = event(
    op="aten.div.Tensor",
    dtype="float32",
    wider="nonfinite",
    bad={"nan": 4},
    inputs=(stats("float32"), stats("float32", zeros=1)),
    descent=(("parameter",), ("norm", "parameter")),
)
INVERSE_NORMS = event(op="aten.rsqrt.default", dtype="float16", wider="nonfinite", inputs=(stats(zeros=1),), descent=(("norm", "parameter"),))  # fmt: skip
EXPONENTIAL = event(op="aten.exp.default", dtype="float32", wider="finite")
GRADIENT = event(phase="backward", wider="finite")
SQRT = event(phase="backward", dtype="float32", wider="nonfinite", forward_op="aten.sqrt.default")
SCALED = RunFacts(scaler=65536.0, clip=1.0)
FALLING = series("scale", [65536.0 / 2**n for n in range(12)])
SETTLING = series("scale", [65536.0, 32768.0, 16384.0, 16384.0])
ZERO_ROWS = TokenRows(parameter="embed.weight", num_rows=70, zero_rows=(68, 69), median_norm=1.0)
UPDATE = localization(
    event(phase="optimizer", module="", op="aten.addcdiv_.default"), reaches=("score.weight",)
)
WITHOUT_EPS = replace(
    UPDATE, vanished=event(phase="optimizer", module="", op="aten.add_.Scalar", scalars=(1e-8,))
)
TOO_LONG = localization(
    origin="unknown", key=FailureKey(kind="length", phase="optimizer"), reaches=("q.weight",)
)
GRPO = RunFacts(zero_loss_by_design="on-policy GRPO")

GEMM = event(op="aten.mm.default", dtype="bfloat16", outputs=(), source=SourceLine(file="m.py", line=3, function="f", text="a @ b"))  # fmt: skip

H20 = Environment(nanstop="0", python="3", gpu="NVIDIA H20", cublas="12.1.3.1")
BF16 = RunFacts(autocast="bfloat16")

ASKS_FP16 = PrecisionFacts(requested="float16", option="fp16=True")
ASKS_BF16 = PrecisionFacts(requested="bfloat16", option="bf16=True")
TRAINED, FROZEN = group("float32", "w"), group("float32", "w", trainable=False)
PACKED = QuantizedFacts(method="bitsandbytes", bits=4, num_layers=7, num_adapted=4)
SCORE = HeadFacts(module="model.score", trained=True)
UNTRAINED = HeadFacts(module="model.score", trained=False)
WHOLE = ResumeFacts(folder="checkpoint-100", step=100, num_moments=4)
PATH = GradientPath(num_trainable=64, num_tensors=2, num_updated=64)
MASTERS = replace(PATH, num_updated=0)
STEPS = ScheduleFacts(scheduler="linear", warmup_steps=10, num_steps=100, micros_per_epoch=40)


def lora(**fields):
    return AdapterFacts(**({"kind": "LORA", "rank": 8, "alpha": 16.0} | fields))


BY_RATE = StepPerRate(length=1.0)


def adamw(lr, **fields):
    return OptimizerFacts(name="AdamW", lr=lr, eps=1e-8, per_rate=BY_RATE, **fields)


def still(norms, elsewhere, at=None):
    """Gradient norms, and the largest gradient that was seen with other weights, in the last
    step by default.
    """
    seen = Series(
        name="grad_elsewhere", steps=(len(norms) - 1 if at is None else at,), values=(elsewhere,)
    )
    return series("grad_norm", norms), seen


def moving(lr, weight, per_rate=BY_RATE, **fields):
    """An optimizer whose steps are ``lr`` long, beside typical weights of ``weight``."""
    step = StepLength(lr=lr, length=lr, weight=weight) if per_rate is not None else None
    return OptimizerFacts(name="Any", lr=lr, eps=1e-8, per_rate=per_rate, step=step, **fields)


def large(num_elements):
    """A trainable group of many parameters."""
    return replace(TRAINED, num_elements=num_elements)


def growing_row(dtype):
    """A range two doublings below the end of its format, which it will reach between steps 530
    and 590.
    """
    return RangeRow(
        module="m",
        op="output",
        dtype=dtype,
        absmax=FORMAT_MAX[dtype] / 4,
        headroom_bits=2.0,
        growth=1 / 40,
        at=500,
        reaches=(530, 590),
    )


def narrow_row(bits, phase="forward"):
    return RangeRow(
        module="m", op="o", dtype="float16", absmax=1e3, headroom_bits=bits, phase=phase
    )


LOG_RATIO = replace(EXPONENTIAL, phase="loss", module="", descent=(("log_ratio", "parameter"),))
POLICY = ObjectiveFacts(method="grpo", beta=0.04, num_generations=8)
WITH_REFERENCE = RunFacts(objective=POLICY)
NO_REFERENCE = RunFacts(objective=replace(POLICY, beta=0.0))
PREFERENCE = RunFacts(objective=ObjectiveFacts(method="dpo", beta=0.1))


def logged(every=10, **metrics):
    """Metrics that a trainer has logged, one of each every ten steps."""
    steps = {name: [every * (place + 1) for place in range(len(v))] for name, v in metrics.items()}
    return Evidence(series=tuple(series(n, v, steps=steps[n]) for n, v in metrics.items()))


def apart(**fields):
    """Copies of a model that differ since step 4; in step 2 they were equal."""
    known = {"weight": "w", "ranks": (1,), "step": 4, "last_equal": 2, "num_differ": 3}
    return setup(world_size=8, replicas=ReplicaFacts(**(known | {"num_compared": 8} | fields)))


GARBAGE = stats("float32", name="head.weight", absmax=3e34, absmin_nonzero=1e-40)
LOST_HEAD = KeyProblem(kind="missing", name="lm_head.weight", detail="not tied", new_on_load=True)

FIRES = [
    ("NS101", probed(FP16, ranges=(narrow_row(-1.0),)), "certain"),
    ("NS101", probed(FP16, ranges=(narrow_row(1.0, "backward"),)), "likely"),
    ("NS101", probed(FP16, loss_scale=4.0, ranges=(narrow_row(-1.0, "backward"),)), "likely"),
    ("NS104", setup(precision=ASKS_FP16), "certain"),
    ("NS104", setup(precision=ASKS_BF16, device="cuda", capability="7.5"), "certain"),
    ("NS104", setup(autocast="bfloat16", device="cuda", capability="7.0"), "certain"),
    ("NS104", setup(param_groups=(group("bfloat16", "w"),), device="cuda", capability="7.0"), "certain"),
    ("NS104", setup(quantized=replace(PACKED, compute_dtype="bfloat16"), device="cuda", capability="6.1"), "certain"),
    ("NS104", setup(precision=PrecisionFacts(tf32=True), device="cuda", capability="7.5"), "certain"),
    ("NS104", setup(precision=PrecisionFacts(requested="float8"), device="cuda", capability="8.0"), "certain"),
    ("NS105", setup(odd_weights=(GARBAGE,)), "likely"),
    ("NS105", setup(odd_weights=(stats("float32", name="w", absmax=4e34, absmin_nonzero=2e32),)), "likely"),
    ("NS105", Evidence(checkpoint=scanned(stored(GARBAGE))), "likely"),
    ("NS105", evidence(localization(overflow(dtype="float32")), RunFacts(odd_weights=(LARGE,))), "likely"),
    ("NS105", Evidence(checkpoint=scanned(keys=(LOST_HEAD,))), "likely"),
    ("NS105", Evidence(checkpoint=scanned(stored(zeros("q.lora_B.weight")), stored(stats(name="q.lora_A.weight")))), "likely"),
    ("NS105", Evidence(checkpoint=scanned(stored(zeros("up.weight")))), "possible"),
    ("NS106", setup(odd_weights=(stats("float32", name="w", nan=1),)), "certain"),
    ("NS106", Evidence(checkpoint=scanned(stored(stats(name="w", posinf=2)))), "certain"),
    ("NS107", setup(quantized=replace(PACKED, num_adapted=0, trained_base=("norm.weight",))), "certain"),
    ("NS107", setup(quantized=replace(PACKED, num_adapted=0), param_groups=(FROZEN,)), "certain"),
    ("NS107", setup(quantized=replace(PACKED, compute_dtype="float16"), autocast="bfloat16"), "likely"),
    ("NS107", setup(quantized=replace(PACKED, bits=8), device="cuda", capability="7.0"), "likely"),
    ("NS107", setup(quantized=replace(PACKED, half_rest="float16")), "possible"),
    ("NS109", setup(head=UNTRAINED, task="sequence_classification", adapter=lora(task_type="CAUSAL_LM"), param_groups=(TRAINED,)), "likely"),
    ("NS109", setup(head=UNTRAINED, task="token_classification", param_groups=(TRAINED, FROZEN)), "likely"),
    ("NS109", setup(head=replace(SCORE, pads=False), task="sequence_classification", batch_shape=(4,)), "likely"),
    ("NS109", setup(task="causal_lm", adapter=lora(task_type="SEQ_CLS")), "possible"),
    ("NS112", setup(host="loop", scaler=1024.0, sinks=("clip", "unscale"), clip=1.0), "certain"),
    ("NS112", setup(host="loop", scaler=1024.0, sinks=("clip", "update")), "certain"),
    ("NS112", setup(host="loop", scaler=1024.0, sinks=("update",)), "certain"),
    ("NS112", evidence(UPDATE, RunFacts(host="loop", scaler=1024.0, sinks=("update",))), "certain"),
    ("NS112", setup(host="loop", autocast="float16", param_groups=(TRAINED,)), "likely"),
    ("NS112", setup(clip=1.0, param_groups=(group("float16", "w"),)), "possible"),
    ("NS113", setup(optimizer=moving(0.2, 0.03)), "likely"),
    ("NS113", setup(optimizer=moving(0.01, 0.02), model_type="llama"), "possible"),
    ("NS113", setup(optimizer=adamw(0.01), model_type="llama"), "possible"),
    ("NS113", setup(optimizer=adamw(0.2), model_type="llama"), "likely"),
    ("NS113", setup(optimizer=adamw(math.nan)), "certain"),
    ("NS113", setup(optimizer=OptimizerFacts(name="SGD", lr=0.1, momentum=1.5)), "certain"),
    ("NS113", setup(optimizer=OptimizerFacts(name="Lion", lr=0.05, per_rate=BY_RATE), model_type="llama"), "possible"),
    ("NS113", setup(optimizer=moving(1.0, 0.05, StepPerRate(length=1.0, relative=True))), "likely"),
    ("NS113", setup(optimizer=adamw(2e-3), param_groups=(large(7_000_000_000),)), "possible"),
    ("NS113", setup(optimizer=adamw(0.0), schedule=STEPS), "certain"),
    ("NS113", setup(schedule=replace(STEPS, warmup_steps=100)), "certain"),
    ("NS113", setup(schedule=STEPS, num_micro=64), "possible"),
    ("NS113", setup(clip=-1.0), "certain"),
    ("NS113", setup(clip=1e-10, optimizer=adamw(1e-4), gradient_path=PATH), "likely"),
    ("NS113", setup(objective=ObjectiveFacts(method="grpo", beta=0.0, num_generations=1)), "certain"),
    ("NS113", setup(objective=ObjectiveFacts(method="grpo", beta=2.0, num_generations=8)), "possible"),
    ("NS113", setup(objective=ObjectiveFacts(method="rloo", beta=-0.1, num_generations=8)), "certain"),
    ("NS113", setup(objective=ObjectiveFacts(method="dpo", beta=0.0)), "certain"),
    ("NS113", setup(objective=ObjectiveFacts(method="dpo", beta=100.0)), "possible"),
    ("NS113", setup(objective=ObjectiveFacts(method="kto", beta=-0.1)), "certain"),
    ("NS113", setup(objective=ObjectiveFacts(method="dpo", beta=math.inf)), "certain"),
    ("NS113", setup(objective=ObjectiveFacts(method="grpo", beta=math.nan, num_generations=8)), "certain"),
    ("NS114", setup(param_groups=(FROZEN,), gradient_path=replace(PATH, num_trainable=0)), "certain"),
    ("NS114", setup(param_groups=(TRAINED,), gradient_path=replace(PATH, num_updated=0)), "certain"),
    ("NS114", setup(gradient_path=replace(PATH, reentrant=True, inputs_require_grad=False)), "likely"),
    ("NS114", setup(gradient_path=replace(PATH, num_reached=0, unreached=("w",))), "certain"),
    ("NS114", setup(gradient_path=replace(PATH, num_reached=0, reached_until=7)), "certain"),
    ("NS114", setup(adapter=lora(alpha=0.0)), "certain"),
    ("NS114", setup(gradient_path=replace(PATH, cut=("head.weight",))), "likely"),
    ("NS114", setup(gradient_path=replace(PATH, num_tensors=9, num_reached=1, unreached=("lora_A",))), "likely"),
    ("NS114", evidence(signals=(Signal(source="exception", message="element 0 of tensors does not require grad and does not have a grad_fn"),)), "certain"),
    ("NS115", setup(resume=ResumeFacts(step=100, num_moments=4, num_zero=4)), "certain"),
    ("NS115", setup(resume=replace(WHOLE, missing=("optimizer.pt", "scheduler.pt"))), "certain"),
    ("NS115", setup(resume=replace(WHOLE, missing=("scaler.pt", "rng_state.pth"))), "likely"),
    ("NS115", setup(resume=ResumeFacts(step=100, missing=("scaler",))), "likely"),
    ("NS115", setup(resume=ResumeFacts(replaced=1.3)), "likely"),
    ("NS116", setup(veto="DeepSpeed applies the update inside its engine"), "certain"),
    ("NS117", setup(num_micro=8, accumulation=AccumulationFacts(by_tokens=False, by_micros=False)), "certain"),
    ("NS117", setup(num_micro=8, accumulation=AccumulationFacts(by_tokens=True, by_micros=True)), "certain"),
    ("NS117", setup(num_micro=2, accumulation=AccumulationFacts(by_tokens=False, counts=(10, 100))), "likely"),
    ("NS117", setup(num_micro=2, accumulation=AccumulationFacts(batch_norms=3)), "possible"),
    ("NS117", setup(num_micro=64, accumulation=AccumulationFacts(sum_format="bfloat16")), "likely"),
    ("NS108", Evidence(facts=BF16, environment=H20), "possible"),
    ("NS601", ended("signal", ("SIGFPE", ""), ("frame", "m.py:3 in f"), op=GEMM), "certain"),
    ("NS601", ended("signal", ("SIGKILL", "")), "possible"),
    ("NS604", ended("oom", ("SIGKILL", ""), ("evidence", "the control group counted 1 kill")), "certain"),
    ("NS604", ended("oom", ("OutOfMemoryError", "CUDA out of memory."), op=GEMM), "certain"),
    ("NS605", ended("timeout", ("hang", "no step for 9 s"), ("frame", "m.py:3 in wait")), "certain"),
    ("NS000", evidence(), "possible"),
    ("NS101", Evidence(facts=RunFacts(autocast="float16", model_type="gemma3_text")), "likely"),
    ("NS101", Evidence(facts=RunFacts(autocast="float16", declared_dtype="bfloat16")), "possible"),
    ("NS101", Evidence(facts=RunFacts(param_groups=(group("float16", "w"),), model_type="t5")), "likely"),
    ("NS101", Evidence(facts=RunFacts(autocast="float16", attention="eager", model_type="qwen2")), "likely"),
    ("NS101", Evidence(facts=FP16, ranges=(RangeRow(module="m", op="o", dtype="float16", absmax=2e4, headroom_bits=1.7),)), "likely"),
    ("NS101", Evidence(facts=FP16, checkpoint=scanned(stored(stats("bfloat16", name="w", absmax=1e5), overflow=1))), "certain"),
    ("NS101", Evidence(facts=RunFacts(), ranges=(growing_row("float16"),)), "likely"),
    ("NS101", Evidence(facts=RunFacts(autocast="bfloat16"), ranges=(growing_row("bfloat16"),)), "likely"),
    ("NS103", Evidence(checkpoint=scanned(token_rows=(ZERO_ROWS,))), "certain"),
    ("NS102", Evidence(facts=half_head()), "likely"),
    ("NS102", Evidence(facts=half_head(eps=1e-5)), "likely"),
    ("NS102", Evidence(facts=half_head(fused=True, betas=(0.9, 0.999))), "likely"),
    ("NS102", Evidence(facts=half_head(dtype="bfloat16")), "possible"),
    ("NS103", Evidence(facts=RunFacts(token_rows=(ZERO_ROWS,))), "certain"),
    ("NS110", Evidence(facts=half_head()), "likely"),
    ("NS110", probed(half_head(), states=(state_row(500),)), "certain"),
    ("NS110", probed(half_head(fused=True), states=(state_row(500),)), "certain"),
    ("NS110", probed(half_head(eps=1e-4), states=(state_row(500),)), "likely"),
    ("NS110", probed(states=(state_row(900, "8-bit"),)), "possible"),
    ("NS402", evidence(TOO_LONG, half_head(fused=True)), "likely"),
    ("NS111", Evidence(facts=half_head(dtype="bfloat16", lr=1e-6)), "likely"),
    ("NS111", probed(lr=1e-6, updates=(update_row(984),)), "certain"),
    ("NS111", probed(updates=(update_row(200), update_row(200))), "possible"),
    ("NS201", evidence(localization(overflow()), FP16), "certain"),
    ("NS201", evidence(localization(overflow(dtype="bfloat16"))), "certain"),
    ("NS201", evidence(localization(overflow(phase="recompute"))), "certain"),
    ("NS201", evidence(localization(overflow(dtype="float32"))), "possible"),
    ("NS202", evidence(localization(MASKED)), "certain"),
    ("NS204", evidence(localization(LOG)), "certain"),
    ("NS204", evidence(localization(event(dtype="float32"))), "likely"),
    ("NS205", evidence(localization(COUNT)), "certain"),
    ("NS205", evidence(localization(COUNTS)), "certain"),
    ("NS205", evidence(localization(EMPTY_SUM)), "certain"),
    ("NS205", evidence(localization(INVERSE_COUNTS)), "certain"),
    ("NS205", evidence(localization(event(op="aten.mean.default", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(0, 4)),)))), "certain"),
    ("NS205", evidence(localization(event(op="aten.std.correction", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(1,)),)))), "certain"),
    ("NS205", evidence(localization(event(op="aten.mse_loss.default", dtype="float32", inputs=(stats("float32", shape=(0,)), stats("float32", shape=(0,))), outputs=(stats("float32", shape=(), nan=1),)))), "certain"),
    ("NS205", evidence(localization(event(op="aten.nll_loss_forward.default", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(4, 8)), stats("int64"), stats("float32", shape=(8,)))))), "certain"),
    ("NS205", evidence(localization(event(op="aten.std.correction", dtype="float32", inputs=(stats("float32", shape=(4, 1)),), outputs=(stats("float32", shape=(4,), nan=4),)))), "certain"),
    ("NS206", evidence(localization(NORMS), RunFacts(token_rows=(ZERO_ROWS,))), "certain"),
    ("NS206", evidence(localization(INVERSE_NORMS)), "certain"),
    ("NS207", evidence(localization(EXPONENTIAL)), "certain"),
    ("NS207", evidence(replace(localization(event(op="aten.mul.Tensor", dtype="float32", wider="finite")), exploded=EXPONENTIAL)), "likely"),
    ("NS207", evidence(localization(event(op="aten.log1p.default", dtype="float32", bad={"neginf": 1}, wider="nonfinite"))), "certain"),
    ("NS208", probed(num_rows_pooled_at_padding=2), "certain"),
    ("NS208", probed(coarse=(coarse_row("aten._to_copy.default", 1.0),)), "likely"),
    ("NS208", probed(coarse=(coarse_row("aten.cos.default", 2.0),)), "likely"),
    ("NS208", probed(logits=logit_gap(0.4)), "likely"),
    ("NS208", probed(loss=6.2, reference_loss=0.33, drift=(drift_row(),)), "possible"),
    ("NS209", evidence(localization(overflow(), origin="absorbed"), signals=()), "certain"),
    ("NS209", Evidence(localization=localization(None, "unknown", absorbed=(overflow(), overflow()))), "certain"),
    ("NS301", evidence(localization(GRADIENT)), "certain"),
    ("NS301", evidence(localization(event(phase="backward")), SCALED), "likely"),
    ("NS302", Evidence(series=(FALLING,)), "certain"),
    ("NS302", evidence(signals=(Signal(source="scaler"),)), "likely"),
    ("NS303", probed(gradients=(gradient_row(900),)), "certain"),
    ("NS303", probed(loss_scale=1.0, gradients=(gradient_row(200),)), "likely"),
    ("NS305", probed(gradients=(gradient_row(10),), are_all_zero=True), "likely"),
    ("NS304", evidence(localization(SQRT, reaches=("loss", "w"))), "certain"),
    ("NS401", evidence(bad_params=("lm_head.weight",)), "certain"),
    ("NS401", evidence(localization(event(), "from_param", culprit="w")), "certain"),
    ("NS402", evidence(WITHOUT_EPS, half_head()), "certain"),
    ("NS402", evidence(UPDATE, half_head()), "likely"),
    ("NS402", evidence(UPDATE, half_head(dtype="float32", state_bits=8)), "likely"),
    ("NS402", evidence(UPDATE, half_head(dtype="float32")), "possible"),
    ("NS402", evidence(UPDATE, half_head(dtype="float32", eps=0.0)), "likely"),
    ("NS402", evidence(UPDATE, replace(half_head(), gradient_path=MASTERS)), "possible"),
    ("NS402", evidence(UPDATE, setup(optimizer=adamw(math.nan)).facts), "certain"),
    ("NS501", evidence(batch=[batch_fact("pixels", "float32", num_bad=4)]), "certain"),
    ("NS501", evidence(batch=[batch_fact("attention_mask", "float32", num_bad=4)]), "certain"),
    ("NS501", evidence(batch=[batch_fact(), replace(batch_fact("weights", "float32", num_bad=1), shape=(4,))]), "likely"),
    ("NS501", evidence(localization(event(), "from_batch", culprit="batch[pixels]")), "certain"),
    ("NS501", evidence(localization(HIDING, "from_batch", culprit="batch[allowed]")), "likely"),
    ("NS506", evidence(localization(event(), "from_constant", culprit="weights", made_before=True)), "certain"),
    ("NS501", evidence(localization(event()), batch=[batch_fact("p", "float32", num_bad=1)]), "possible"),
    ("NS502", evidence(facts=RunFacts(table_rows=64), batch=[batch_fact(maximum=64.0)]), "likely"),
    ("NS502", evidence(batch=[batch_fact("labels", minimum=-1.0)]), "likely"),
    ("NS502", evidence(signals=(Signal(source="exception", message="index out of range in self"),)), "possible"),
    ("NS503", evidence(batch=[batch_fact("labels", num_supervised=0)]), "likely"),
    ("NS503", evidence(localization(NO_TOKEN, counted=("kept",)), batch=[NONE_KEPT]), "certain"),
    ("NS503", evidence(localization(event(op="aten.nll_loss_forward.default", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(0, 8)), stats("int64", shape=(0,)))))), "certain"),
    ("NS503", evidence(localization(event(op="aten.nll_loss_forward.default", dtype="float32")), batch=[batch_fact("labels", num_supervised=0)]), "certain"),
    ("NS602", evidence(localization(event(reference="finite"))), "certain"),
    ("NS602", evidence(localization(event(op="fastattn.backward.default", phase="backward", dtype="float32", bad={"nan": 9}, wider="finite", inputs=(stats(absmax=24.0), stats("float32", absmax=3.4028e38))))), "likely"),
    ("NS602", evidence(localization(event(op="aten.empty.memory_format"), "unknown", unseen_write="finite")), "likely"),
    ("NS602", evidence(facts=RunFacts(compiled=True), replay=Replay(incident="1", fidelity="bitwise", runs=2, eager="finite")), "likely"),
    ("NS603", evidence(replay=NOT_REPRODUCED), "likely"),
    ("NS701", logged(frac_reward_zero_std=[1.0] * 3, reward_std=[0.0] * 3, reward=[0.5] * 3), "certain"),
    ("NS701", logged(frac_reward_zero_std=[1.0] * 3, reward_std=[0.2] * 3), "likely"),
    ("NS701", logged(frac_reward_zero_std=[1.0] * 3, rewards_apart=[1.0] * 3), "certain"),
    ("NS701", logged(frac_reward_zero_std=[0.5, *[1.0] * 4], reward_std=[0.2] * 5), "likely"),
    ("NS701", replace(logged(frac_reward_zero_std=[1.0] * 3, grad_norm=[0.4] * 3), facts=WITH_REFERENCE), "likely"),
    ("NS701", replace(logged(frac_reward_zero_std=[1.0] * 3, grad_norm=[1e-5] * 3), facts=NO_REFERENCE), "likely"),
    ("NS701", Evidence(facts=PREFERENCE, series=still([0.0] * 4, 0.0)), "likely"),
    ("NS701", Evidence(facts=RunFacts(gradient_path=replace(PATH, zeros=("mask",))), series=still([0.0] * 64, 0.0)), "possible"),
    ("NS701", probed(objective=(objective_row("own_mean", "aten.sub.Tensor"),), are_all_zero=True), "certain"),
    ("NS701", Evidence(series=still([0.3, *[0.0] * 64], 0.0)), "possible"),
    ("NS702", evidence(localization(LOG_RATIO)), "certain"),
    ("NS702", evidence(localization(replace(LOG_RATIO, phase="forward", module="model"))), "certain"),
    ("NS702", logged(kl=[0.02, 31.0]), "likely"),
    ("NS702", probed(ratios=(RatioRow(op="aten.exp.default", module="", largest=4e8),)), "likely"),
    ("NS702", logged(kl=[0.02, 4e5]), "certain"),
    ("NS702", logged(kl=[0.02, math.inf]), "certain"),
    ("NS702", logged(kl=[31.0, 25.0], every=1), "likely"),
    ("NS702", Evidence(series=(series("log_ratio/at_once", [1e-3] * 3), series("log_ratio/later", [2.5] * 3))), "likely"),
    ("NS703", Evidence(series=(series("log_ratio/at_once", [0.2, 0.1, 0.3]),)), "likely"),
    ("NS703", Evidence(series=(series("log_ratio/at_once", [0.7, 0.8]),)), "certain"),
    ("NS703", logged(**{"sampling/sampling_logp_difference/mean": [0.07, 0.06]}), "likely"),
    ("NS703", logged(**{"sampling/importance_sampling_ratio/mean": [0.895, 0.9]}), "likely"),
    ("NS302", Evidence(series=(series("scale", [65536.0, 32768.0, *[65536.0, 32768.0] * 10]),)), "certain"),
    ("NS704", Evidence(series=(series("reward_inf/num_words", [0.125], steps=[3]),)), "certain"),
    ("NS704", Evidence(series=(series("reward_nan/num_words", [0.5], steps=[3]),)), "certain"),
    ("NS704", Evidence(series=(series("reward_huge/num_words", [0.5], steps=[3]),)), "certain"),
    ("NS704", evidence(signals=(Signal(source="reward", name="num_words", value=3e38, message="1 of 8 rewards"),)), "certain"),
    ("NS704", Evidence(series=(series("reward_unscored", [0.5], steps=[3]),)), "likely"),
    ("NS704", evidence(signals=(Signal(source="reward", name="num_words", value=math.inf, message="1 of 8 rewards"),)), "certain"),
    ("NS704", evidence(signals=(Signal(source="reward", value=math.nan, message="1 of 8 rewards"),)), "likely"),
    ("NS704", evidence(localization(event(), "from_batch", culprit="batch[a]", weighs_choices=True)), "likely"),
    ("NS802", Evidence(facts=GRPO, series=(series("loss_logged", [0.0]), series("grad_norm", [0.4]))), "certain"),
    ("NS118", probed(objective=(objective_row(),)), "certain"),
    ("NS118", probed(objective=(objective_row("between_0_and_1"),)), "likely"),
    ("NS118", probed(objective=(objective_row("between_0_and_1", "aten.binary_cross_entropy_with_logits"),)), "certain"),
    ("NS118", probed(objective=(objective_row("own_token"),)), "likely"),
    ("NS118", probed(objective=(objective_row("unsigned", "aten.soft_margin_loss.default"),)), "likely"),
    ("NS118", probed(objective=(objective_row("never_below", "aten.eq.Scalar"),)), "likely"),
    ("NS118", probed(objective=(objective_row("mixed", "aten._log_softmax.default"),)), "likely"),
    ("NS118", probed(objective=(objective_row("out_of_reach", "aten.mse_loss.default", 12),)), "likely"),
    ("NS118", probed(objective=(objective_row("later_token"),)), "likely"),
    ("NS118", probed(objective=(objective_row("every_pair", "aten.sub.Tensor", 12),)), "likely"),
    ("NS118", probed(objective=(objective_row("scores", "aten.nll_loss_forward.default"),)), "likely"),
    ("NS505", setup(data=DataFacts(num_rows=64, num_labelled=64, num_without_labels=64)), "certain"),
    ("NS505", setup(data=DataFacts(num_rows=64, num_labelled=64, num_without_labels=40)), "likely"),
    ("NS505", setup(data=DataFacts(num_rows=64, num_twice_begun=64)), "likely"),
    ("NS505", setup(data=DataFacts(num_rows=64, num_cut=64)), "likely"),
    ("NS113", setup(rates=RateFacts(num_used=24, num_dead=3, highest=1e-3, coming=0.0)), "certain"),
    ("NS113", setup(rates=RateFacts(num_used=3, num_dead=3, highest=0.0, coming=0.0)), "certain"),
    ("NS113", setup(rates=RateFacts(num_used=40, num_dead=0, highest=1e-4, coming=1e-3)), "likely"),
    ("NS113", setup(rates=RateFacts(num_used=16, num_dead=0, highest=1e-6, coming=1e-3, rising=100_000)), "likely"),
    *account_cases.FIRES,
    ("NS607", apart(last_equal=None), "certain"),
    ("NS607", apart(num_updates=(2, 1)), "certain"),
    ("NS607", apart(num_updates=(3, 3), num_local=1), "possible"),
    ("NS607", apart(option="lr", options=(0.02, 0.03)), "likely"),
    ("NS607", apart(state="step of w"), "likely"),
    ("NS607", apart(arrived_equal=True, consumed_equal=False, is_that_update=True, written_at=(SourceLine(file="a.py", line=3, function="train", text="p.grad *= rank"),)), "certain"),
    ("NS607", apart(arrived_equal=True, consumed_equal=False), "likely"),
    ("NS607", apart(arrived_equal=False, consumed_equal=False, is_exchanged=False, is_that_update=True), "certain"),
    ("NS607", apart(arrived_equal=False, consumed_equal=False, is_that_update=True), "likely"),
    ("NS607", apart(arrived_equal=True, consumed_equal=True, is_that_update=True, largest=0.5, index=(1, 2), values=(1.5, 1.0), measured=6), "likely"),
    ("NS607", apart(ranks=(1, 2, 3, 5, 6, 7), largest=0.5, values=(1.5, 1.0), measured=6), "likely"),
    ("NS119", setup(mode=ModeFacts(num_train=20, num_eval=40, modules=("conv.1", "cls.0"))), "likely"),
    ("NS112", setup(clipping=ClippingFacts(num_updates=4, limit=1.0, norm=8.0)), "certain"),
    ("NS112", setup(clipping=ClippingFacts(num_updates=4, limit=1.0, norm=8.0, is_of_none=True)), "certain"),
    ("NS113", setup(rates=RateFacts(num_used=192, num_dead=0, highest=0.004, coming=0.1, num_schedule_steps=6, length=192)), "likely"),
    ("NS114", setup(gradient_path=GradientPath(num_trainable=9, num_tensors=4, num_reached=4, replaced=("head.weight",), replaced_after=64)), "likely"),
    ("NS117", setup(accumulation=AccumulationFacts(num_single=16, num_asked=8)), "certain"),
    *training_cases.FIRES,
]  # fmt: skip

SILENT = [
    ("NS113", setup(optimizer=OptimizerFacts(name="SGD", lr=0.1, momentum=0.99))),
    ("NS101", Evidence(facts=FP16, checkpoint=scanned(stored(stats("bfloat16", name="w"))))),
    ("NS105", evidence(localization(MASKED), RunFacts(odd_weights=(LARGE,)))),
    ("NS105", evidence(localization(overflow(dtype="float32")))),
    ("NS105", setup(odd_weights=(stats("float32", name="w", absmax=1e30, absmin_nonzero=1e30),))),
    ("NS105", setup(odd_weights=(stats("float32", name="w", absmax=1e9, absmin_nonzero=1e-2),))),
    ("NS105", Evidence(checkpoint=scanned(stored(stats("float32", name="w", absmax=1.0, absmin_nonzero=1e-40))))),
    ("NS105", Evidence(checkpoint=scanned(keys=(replace(LOST_HEAD, kind="unexpected", new_on_load=False),)))),
    ("NS105", Evidence(checkpoint=scanned(stored(zeros("q.lora_B.weight")), stored(stats(name="k.lora_B.weight"))))),
    ("NS105", Evidence(checkpoint=scanned(stored(zeros("norm.weight", shape=(4,))), stored(zeros("q.bias"))))),
    ("NS106", setup()),
    ("NS106", Evidence(checkpoint=scanned(stored(stats("float32", name="mask", absmax=0.0, neginf=6))))),
    ("NS101", probed(FP16, loss_scale=65536.0, ranges=(narrow_row(-1.0, "backward"),))),
    ("NS104", setup(precision=ASKS_FP16, autocast="float16")),
    ("NS104", setup(precision=ASKS_FP16, device="cuda", capability="7.0")),
    ("NS104", setup(precision=ASKS_BF16, autocast="bfloat16")),
    ("NS104", setup(precision=ASKS_BF16, capability="7.0")),
    ("NS104", setup(precision=ASKS_BF16, device="cuda", capability="8.0")),
    ("NS104", setup(precision=ASKS_BF16, device="cuda", capability="12.0")),
    ("NS104", setup(precision=ASKS_BF16, device="cuda")),
    ("NS104", setup(precision=PrecisionFacts(tf32=False), device="cuda", capability="7.5")),
    ("NS107", setup(autocast="float16")),
    ("NS107", setup(quantized=PACKED, param_groups=(TRAINED, FROZEN))),
    ("NS107", setup(quantized=replace(PACKED, half_rest="bfloat16", compute_dtype="bfloat16"), autocast="bfloat16")),
    ("NS107", setup(quantized=replace(PACKED, compute_dtype="float16"), autocast="float16")),
    ("NS107", setup(quantized=replace(PACKED, num_adapted=0), param_groups=(TRAINED, FROZEN))),
    ("NS107", setup(quantized=replace(PACKED, bits=8), device="cuda", capability="7.5")),
    ("NS107", setup(quantized=replace(PACKED, bits=8), capability="7.0")),
    ("NS109", setup(head=SCORE, task="sequence_classification", adapter=lora(task_type="SEQ_CLS"), param_groups=(TRAINED,), batch_shape=(8,))),
    ("NS109", setup(head=SCORE, task="sequence_classification", adapter=lora(modules_to_save=("score",)), param_groups=(TRAINED,))),
    ("NS109", setup(head=replace(SCORE, pads=False), task="sequence_classification", batch_shape=(1,))),
    ("NS109", setup(task="causal_lm", adapter=lora(task_type="CAUSAL_LM"))),
    ("NS109", setup(task="causal_lm", adapter=lora())),
    ("NS109", setup(task="seq2seq_lm", adapter=lora(task_type="CAUSAL_LM"))),
    ("NS112", setup(host="loop", scaler=1024.0, sinks=("unscale", "clip"), clip=1.0)),
    ("NS112", setup(host="loop", scaler=1.0, sinks=("update",))),
    ("NS112", evidence(UPDATE, RunFacts(host="loop", scaler=1024.0, sinks=("clip",)))),
    ("NS112", setup(host="loop", sinks=("clip",), clip=1.0, param_groups=(TRAINED,))),
    ("NS112", setup(host="Trainer", autocast="float16", param_groups=(TRAINED,))),
    ("NS112", setup(host="loop", autocast="bfloat16", param_groups=(TRAINED,))),
    ("NS112", setup(host="loop", autocast="float16", sinks=("scale",), param_groups=(TRAINED,))),
    ("NS112", setup(host="loop", autocast="float16", scaler=65536.0, param_groups=(TRAINED,))),
    ("NS112", setup(clip=1.0, param_groups=(group("bfloat16", "w"),))),
    ("NS112", setup(clip=1.0, param_groups=(group("float16", "w"),), gradient_path=MASTERS)),
    ("NS113", setup(optimizer=adamw(1e-3), schedule=STEPS, clip=1.0, num_micro=32, gradient_path=PATH)),
    ("NS113", setup(optimizer=adamw(5e-3), adapter=lora(), param_groups=(large(200_000_000),))),
    ("NS113", setup(optimizer=adamw(6e-4), param_groups=(large(125_000_000),))),
    ("NS113", setup(optimizer=adamw(1e-4), clip=1.0, gradient_path=replace(PATH, num_trainable=70_000_000_000))),
    ("NS113", setup(optimizer=OptimizerFacts(name="SGD", lr=0.5))),
    ("NS113", setup(optimizer=adamw(0.01))),
    ("NS113", setup(optimizer=adamw(1.0))),  # of a model of another kind, whose weights were not looked at
    ("NS113", setup(optimizer=moving(0.1, 0.03))),
    ("NS113", setup(optimizer=moving(0.009, 0.02), model_type="llama")),
    ("NS113", setup(optimizer=moving(5.0, 0.02, None))),
    ("NS113", setup(optimizer=adamw(0.0, scheduled=1e-3), schedule=STEPS)),
    ("NS113", setup(optimizer=OptimizerFacts(name="Adafactor", lr=0.01, per_rate=StepPerRate(length=1.0, relative=True)), model_type="t5")),
    ("NS113", setup(optimizer=adamw(0.0))),
    ("NS113", setup(optimizer=adamw(5e-5), schedule=ScheduleFacts(scheduler="linear"), clip=None)),
    ("NS113", setup(objective=ObjectiveFacts(method="grpo", beta=0.0, num_generations=2))),
    ("NS113", setup(objective=ObjectiveFacts(method="dpo", beta=0.1))),
    ("NS113", setup(objective=ObjectiveFacts(method="kto", beta=0.1))),
    ("NS113", setup(objective=ObjectiveFacts(method="cpo", beta=20.0))),
    ("NS114", setup(param_groups=(TRAINED,), gradient_path=PATH)),
    ("NS114", setup(param_groups=(TRAINED,), gradient_path=replace(PATH, num_updated=None, num_reached=1))),
    ("NS114", setup(param_groups=(TRAINED,), gradient_path=replace(PATH, reentrant=True, inputs_require_grad=True))),
    ("NS114", setup(param_groups=(group("bfloat16", "w"),), gradient_path=replace(PATH, num_updated=0))),
    ("NS114", setup(param_groups=(TRAINED,), world_size=2, gradient_path=replace(PATH, num_updated=0))),
    ("NS114", setup(adapter=lora())),
    ("NS114", setup(gradient_path=replace(PATH, num_tensors=9, num_reached=3))),
    ("NS114", evidence(facts=RunFacts(adapter=lora(alpha=0.0)))),
    ("NS115", setup(resume=WHOLE)),
    ("NS115", setup(resume=ResumeFacts(step=100, num_moments=4, num_zero=3))),
    ("NS115", setup(resume=ResumeFacts(num_moments=4, num_zero=4))),
    ("NS116", setup()),
    ("NS117", setup(num_micro=8, accumulation=AccumulationFacts(by_tokens=True, by_micros=False, counts=(1, 9)))),
    ("NS117", setup(num_micro=8, accumulation=AccumulationFacts(counts=(10, 100)))),
    ("NS117", setup(num_micro=2, accumulation=AccumulationFacts(by_tokens=False, counts=(100, 101)))),
    ("NS117", setup(num_micro=1, accumulation=AccumulationFacts(batch_norms=3))),
    ("NS117", setup(num_micro=8, accumulation=AccumulationFacts(sum_format="bfloat16"))),
    ("NS110", Evidence(facts=half_head(dtype="float32"))),
    ("NS110", Evidence(facts=half_head(state_bits=8))),
    ("NS110", Evidence(facts=half_head(fused=True))),
    ("NS110", Evidence(facts=replace(half_head(), gradient_path=MASTERS))),
    ("NS110", probed(states=(state_row(900, "float32"), state_row(5), state_row(300, "8-bit")))),
    ("NS111", Evidence(facts=half_head(dtype="bfloat16", lr=2e-4))),
    ("NS111", Evidence(facts=half_head(dtype="float32", lr=1e-6))),
    ("NS111", Evidence(facts=replace(half_head(dtype="bfloat16", lr=1e-6), gradient_path=MASTERS))),
    ("NS111", Evidence(facts=half_head(dtype="bfloat16", lr=1e-6, per_rate=None))),
    ("NS111", probed(half_head(dtype="bfloat16", lr=1e-6), updates=(update_row(7),))),
    ("NS208", probed(coarse=(coarse_row("aten.cos.default", 0.1),), logits=logit_gap(0.03))),
    ("NS208", probed(loss=6.2, reference_loss=0.33)),
    ("NS208", probed(loss=0.331, reference_loss=0.33, drift=(drift_row(),))),
    ("NS208", probed(loss=math.nan, reference_loss=0.33, drift=(drift_row(),))),
    ("NS303", probed(gradients=(gradient_row(50), gradient_row(900, "bfloat16")))),
    ("NS115", setup(resume=ResumeFacts(replaced=0.01))),
    ("NS305", probed(gradients=(gradient_row(10),))),
    ("NS305", probed(gradients=(gradient_row(900),), are_all_zero=True)),
    ("NS108", Evidence(facts=BF16)),
    ("NS108", Evidence(facts=RunFacts(), environment=H20)),
    ("NS601", ended("oom", ("SIGKILL", ""))),
    ("NS601", evidence(localization(event()))),
    ("NS604", ended("signal", ("SIGKILL", ""))),
    ("NS605", ended("signal", ("SIGFPE", ""), op=GEMM)),
    ("NS000", Evidence(facts=FP16)),
    ("NS101", Evidence(facts=RunFacts(), ranges=(replace(growing_row("float16"), growth=None, reaches=None),))),
    ("NS101", Evidence(facts=RunFacts(autocast="bfloat16", model_type="gemma3"))),
    ("NS101", Evidence(facts=RunFacts(autocast="float16", model_type="llama", declared_dtype="float16"))),
    ("NS101", Evidence(facts=RunFacts(autocast="float16", attention="sdpa", model_type="qwen2"))),
    ("NS101", Evidence(facts=FP16, ranges=(RangeRow(module="m", op="o", dtype="float32", absmax=2e4, headroom_bits=1.0),))),
    ("NS102", Evidence(facts=half_head(dtype="float32"))),
    ("NS102", Evidence(facts=replace(half_head(), gradient_path=MASTERS))),
    ("NS103", Evidence(facts=RunFacts(token_rows=(TokenRows(parameter="e", num_rows=64),)))),
    ("NS103", Evidence(facts=RunFacts(token_rows=(TokenRows(parameter="e", num_rows=3, zero_rows=(0, 1, 2)),)))),
    ("NS201", evidence(localization(event(wider="nonfinite")))),
    ("NS201", evidence(localization(event(wider="unknown")))),
    ("NS201", evidence(localization(overflow(), origin="from_param"))),
    ("NS201", evidence(localization(GRADIENT))),
    ("NS202", evidence(localization(event(op="aten._softmax.default", bad={"nan": 9})))),
    ("NS204", evidence(localization(overflow()))),
    ("NS204", evidence(localization(HANDED_ON))),
    ("NS204", evidence(localization(event(wider="unknown")))),
    ("NS204", evidence(localization(SQRT))),
    ("NS205", evidence(localization(NORMS))),
    ("NS205", evidence(localization(replace(EMPTY_SUM, descent=(("data",),))))),
    ("NS206", evidence(localization(COUNTS))),
    ("NS206", evidence(localization(INVERSE_COUNTS))),
    ("NS205", evidence(localization(event(op="aten.nll_loss_forward.default", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(4, 8)), stats("int64")))))),
    ("NS205", evidence(localization(event(op="aten.mean.default", dtype="float32", inputs=(stats("float32"),))))),
    ("NS205", evidence(localization(event(op="aten.mean.default", dtype="float32", inputs=(stats("float32", shape=(1,)),))))),
    ("NS206", evidence(localization(COUNT))),
    ("NS206", evidence(localization(replace(NORMS, descent=())))),
    ("NS205", evidence(localization(replace(COUNT, descent=(("parameter",), ("constant",)))))),
    ("NS202", evidence(localization(replace(MASKED, read_by=("topk", "sum"))))),
    ("NS206", evidence(localization(event(op="aten.div.Tensor", dtype="float32", inputs=(stats(), stats()))))),
    ("NS207", evidence(localization(event(op="aten.exp.default", wider="finite")))),
    ("NS207", evidence(localization(LOG))),
    ("NS209", evidence(localization(overflow(), absorbed=(overflow(),)))),
    ("NS209", evidence(localization(None, "unknown"))),
    ("NS301", evidence(localization(event(phase="backward")))),
    ("NS301", evidence(localization(SQRT), SCALED)),
    ("NS301", evidence(localization(overflow()), SCALED)),
    ("NS302", Evidence(series=(SETTLING,))),
    ("NS304", evidence(localization(GRADIENT))),
    ("NS304", evidence(localization(LOG))),
    ("NS401", evidence(UPDATE, bad_params=("score.weight",))),
    ("NS401", evidence(localization(event()))),
    ("NS402", evidence(localization(event()))),
    ("NS501", evidence(batch=[batch_fact("pixels", "float32", micro=0, num_bad=4)])),
    ("NS501", evidence(localization(event()), batch=[batch_fact("allowed", "float32", num_bad=9, hides=True)])),
    ("NS502", evidence(facts=RunFacts(table_rows=64), batch=[batch_fact(maximum=63.0, minimum=0.0)])),
    ("NS502", evidence(facts=RunFacts(table_rows=64), batch=[batch_fact("labels", minimum=-100.0)])),
    ("NS502", evidence(facts=RunFacts(table_rows=64), batch=[batch_fact("position_ids", maximum=900.0)])),
    ("NS502", evidence(signals=(Signal(source="exception", message="disk full"),))),
    ("NS503", evidence(batch=[batch_fact("labels", num_supervised=0)], signals=())),
    ("NS503", evidence(localization(COUNT, counted=("kept",)), batch=[NONE_KEPT])),
    ("NS503", evidence(localization(NO_TOKEN, counted=("others",)), batch=[NONE_KEPT])),
    ("NS503", evidence(localization(NO_TOKEN, counted=("kept",)), batch=[replace(NONE_KEPT, maximum=1.0)])),
    ("NS503", evidence(localization(event(op="aten.mean.default", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(0, 4)),))))),
    ("NS503", evidence(batch=[batch_fact("labels", num_supervised=5)])),
    ("NS602", evidence(localization(event(reference="nonfinite")))),
    ("NS602", evidence(localization(event(op="aten.empty.memory_format"), "unknown", unseen_write="nonfinite"))),
    ("NS602", evidence(localization(event(op="aten.empty.memory_format"), "unknown"))),
    ("NS602", evidence(localization(event(op="aten.empty.memory_format", inputs=()), "unknown", unseen_write="finite"))),
    ("NS602", evidence(localization(event(op="aten.empty.memory_format", inputs=(stats(nan=1),)), "unknown", unseen_write="finite"))),
    ("NS602", evidence(localization(event(op="fastattn.forward.default", bad={"nan": 9}, inputs=(stats(absmax=24.0),))))),
    ("NS602", evidence(localization(event(op="fastattn.forward.default", dtype="float32", inputs=(stats("float32", absmax=1e30),))))),
    ("NS602", evidence(localization(event(dtype="float32", bad={"nan": 9}, inputs=(stats(absmax=24.0),))))),
    ("NS301", evidence(localization(event(op="fastattn.backward.default", phase="backward", dtype="float32", bad={"nan": 9}, wider="finite", inputs=(stats(absmax=24.0),))))),
    ("NS602", evidence(replay=Replay(incident="1", fidelity="bitwise", runs=2, eager="finite"))),
    ("NS603", evidence(replay=Replay(incident="1", fidelity="not_reproduced", runs=2, private_rng=True))),
    ("NS603", evidence(replay=Replay(incident="1", fidelity="bitwise", runs=2))),
    ("NS603", evidence(localization(overflow(), origin="absorbed"), replay=NOT_REPRODUCED)),
    ("NS701", logged(frac_reward_zero_std=[1.0], reward_std=[0.0], every=2)),
    ("NS701", probed(objective=(objective_row("own_mean", "aten.sub.Tensor"),))),
    ("NS118", probed(objective=(objective_row("own_mean", "aten.sub.Tensor"),))),
    ("NS701", logged(frac_reward_zero_std=[1.0, 1.0, 0.5], reward_std=[0.0, 0.0, 0.1])),
    ("NS701", logged(frac_reward_zero_std=[0.5, 1.0], reward_std=[0.1, 0.0])),
    ("NS701", replace(logged(frac_reward_zero_std=[1.0] * 3, grad_norm=[0.4] * 3), facts=NO_REFERENCE)),
    ("NS701", Evidence(facts=GRPO, series=(series("loss_logged", [0.0] * 8), series("grad_norm", [0.4] * 8)))),
    ("NS701", Evidence(facts=PREFERENCE, series=still([0.3, 0.0, 0.0, 0.0, 0.0], 0.0))),
    ("NS701", Evidence(facts=PREFERENCE, series=still([0.0] * 80, 0.01))),
    ("NS701", Evidence(facts=PREFERENCE, series=still([0.0] * 80, math.nan))),
    ("NS701", Evidence(facts=PREFERENCE, series=still([0.0, 0.0, 0.3, *[0.0] * 80], 0.0, at=1))),
    ("NS701", Evidence(facts=PREFERENCE, series=(series("grad_norm", [0.0] * 80),))),
    ("NS701", Evidence(series=still([0.0] * 63, 0.0))),
    ("NS701", Evidence(facts=FP16, series=still([0.0] * 80, 0.0))),
    ("NS701", Evidence(facts=RunFacts(gradient_path=replace(PATH, num_reached=0)), series=still([0.0] * 80, 0.0))),
    ("NS702", evidence(localization(EXPONENTIAL))),
    ("NS702", probed()),
    ("NS702", evidence(localization(replace(LOG_RATIO, descent=(("log_probability",),))))),
    ("NS702", evidence(localization(replace(EXPONENTIAL, source=SourceLine(file="m.py", line=1, function="f", text="kl = logratio.exp()"))))),
    ("NS702", logged(kl=[0.02, 0.4, -1.5, 6.0])),
    ("NS702", logged(kl=[30.0, 0.4])),
    ("NS702", logged(kl=[30.0, 0.4], every=1)),
    ("NS702", Evidence(series=(series("log_ratio/at_once", [2.0] * 3), series("log_ratio/later", [2.5] * 3)))),
    ("NS703", Evidence(series=(series("log_ratio/at_once", [0.01, 0.02, 0.3]),))),
    ("NS703", logged(**{"sampling/sampling_logp_difference/mean": [0.012, 0.015]})),
    ("NS703", logged(**{"sampling/importance_sampling_ratio/mean": [0.99, 1.02]})),
    ("NS704", Evidence(series=(series("reward", [0.1, math.nan]),))),
    ("NS704", evidence(localization(event(), "from_batch", culprit="batch[rewards]"))),
    ("NS802", Evidence(facts=GRPO, series=(series("loss_logged", [0.0]), series("grad_norm", [0.0])))),
    ("NS802", Evidence(facts=GRPO, series=(series("loss_logged", [0.0]), series("grad_norm", [math.nan])))),
    ("NS802", Evidence(facts=RunFacts(), series=(series("loss_logged", [0.0]), series("grad_norm", [0.4])))),
    ("NS118", probed()),
    ("NS118", probed(objective=(objective_row("one_class", width=1),))),
    ("NS505", setup(data=DataFacts(num_rows=64, num_labelled=64, num_without_labels=20))),
    ("NS505", setup(data=DataFacts(num_rows=64, num_twice_begun=3, num_cut=63))),
    ("NS505", setup(data=DataFacts(num_rows=2, num_labelled=2, num_without_labels=2))),
    ("NS113", setup(rates=RateFacts(num_used=24, num_dead=0, highest=1e-3, coming=0.0))),
    ("NS113", setup(rates=RateFacts(num_used=24, num_dead=3, highest=1e-3, coming=1e-3))),
    *account_cases.SILENT,
    ("NS506", evidence(localization(event(), "from_batch", culprit="batch[weights]"))),
    ("NS607", Evidence(facts=RunFacts(world_size=2, ranks_agree=True))),
    ("NS119", setup(mode=ModeFacts(num_train=20, num_eval=40))),
    ("NS119", setup()),
    *training_cases.SILENT,
]  # fmt: skip


@pytest.mark.parametrize(("code", "given", "confidence"), FIRES)
def test_rule_fires(code, given, confidence):
    diagnosis = check(code, given)
    assert (diagnosis.code, diagnosis.confidence) == (code, confidence)


@pytest.mark.parametrize(("code", "given"), SILENT)
def test_rule_is_silent(code, given):
    assert check(code, given) is None


@pytest.mark.parametrize("rule", CATALOGUE, ids=lambda rule: rule.code)
def test_no_evidence_no_finding(rule):
    assert rule.check(Evidence()) is None


def test_a_reward_that_is_a_number_is_bounded_and_one_that_is_none_is_given_one():
    def advised(series_name, value):
        signals = (Signal(source="reward", name="judge", value=value, message="1 of 8 rewards"),)
        logged = check("NS704", Evidence(series=(series(f"{series_name}/judge", [0.5]),)))
        assert logged.lines == check("NS704", evidence(signals=signals)).lines
        return logged.lines[0]

    assert "bound the reward" in advised("reward_huge", 3e38)
    assert "finite worst reward" in advised("reward_inf", math.inf)
    assert "finite worst reward" in advised("reward_nan", math.nan)


@pytest.mark.parametrize(("kind", "word"), [("float16", "float32"), ("bfloat16", "scan")])
def test_a_reward_that_is_a_model_is_told_as_that(kind, word):
    facts = RunFacts(objective=ObjectiveFacts(method="grpo", reward_models=(("judge", kind),)))
    told = check("NS704", Evidence(facts=facts, series=(series("reward_nan/judge", [1.0]),)))
    assert len(told.lines) == 1
    assert f"`judge` is a model whose weights are {kind}" in told.lines[0]
    assert word in told.lines[0]


def test_a_clip_to_infinity_that_was_left_out_is_told():
    facts = RunFacts(host="Trainer", infinite_norm_at=3)
    at = StepId(run="r", step=3)
    told = check("NS305", Evidence(facts=facts, at=at, learned=("infinite_norm_at",)))
    assert (told.confidence, told.where) == ("certain", "Trainer")
    assert "every gradient NaN: left out" in told.cause
    assert check("NS305", Evidence(facts=facts)) is None


def test_a_clip_below_0_is_told_at_its_line():
    line = SourceLine(file="t.py", line=5, function="f")
    told = check("NS113", setup(clip=-1.0, sinks=("clip", "step"), sink_at=line))
    assert told.source == line
    assert check("NS113", setup(clip=-1.0, sinks=("step",), sink_at=line)).source is None


@pytest.mark.parametrize(("name", "is_told"), [("task2", True), ("task1", False)])
def test_an_adapter_that_is_trained_and_not_active_is_named(name, is_told):
    path = replace(PATH, num_reached=0, unreached=(f"q.lora_A.{name}.weight",))
    found = check("NS114", setup(gradient_path=path, adapter=lora(idle=("task2",))))
    assert ('model.set_adapter("task2")' in found.usual_cure) == is_told
    assert ("which is not active" in found.cause) == is_told


def test_an_advantage_of_the_scripts_own_names_the_line_that_gives_it():
    line = SourceLine(file="t.py", line=9, function="a", text='out["a"] = r / r.std()')
    place = localization(event(), "from_batch", culprit="batch[a]", weighs_choices=True)
    for name, is_told in (("a", True), ("b", False)):
        objective = ObjectiveFacts(method="grpo", entries_at=(replace(line, function=name),))
        found = check("NS704", evidence(place, RunFacts(objective=objective)))
        assert any("t.py:9" in one for one in found.lines) == is_told


def test_a_reward_of_a_model_whose_weights_are_bad_names_one():
    judge = {"reward_models": (("judge", "float32"),), "bad_weights": (("judge", "score.weight"),)}
    facts = RunFacts(objective=ObjectiveFacts(method="grpo", **judge))
    told = check("NS704", Evidence(facts=facts, series=(series("reward_nan/judge", [1.0]),)))
    (line,) = told.lines
    assert line.startswith("`judge` is a model, and its `score.weight` is not finite: load it from")


def test_a_loss_that_is_refused_is_cured_by_what_switches_gradients_on():
    """Checkpointing is blamed where there is some."""
    message = "element 0 of tensors does not require grad and does not have a grad_fn"
    refused = Signal(source="exception", message=message)

    def cure(path):
        given = evidence(facts=RunFacts(host="loop", gradient_path=path), signals=(refused,))
        return diagnose(given, "incident")[0].usual_cure

    assert "use_reentrant" in cure(replace(PATH, reentrant=True))
    assert "set_grad_enabled" in cure(replace(PATH, is_off=True))
    assert cure(PATH).startswith("look for")


def test_overflow_candidates_in_order_of_intrusion():
    module = "model.layers.1.mlp"
    assert remedies(check("NS201", evidence(localization(overflow()), FP16))) == [
        f"island({module}, float32->input)",
        f"island({module}, float32)",
        f"island({module}, float32) + outer_autocast(float16)",
        "bf16",
    ]


def test_overflow_in_attention_also_offers_the_other_kernel():
    assert "attention(sdpa)" in remedies(check("NS201", evidence(localization(ATTENTION), EAGER)))
    assert "attention(eager)" not in remedies(
        check("NS201", evidence(localization(ATTENTION), EAGER))
    )


def test_bfloat16_is_no_cure_for_a_bfloat16_overflow():
    assert "bf16" not in remedies(
        check("NS201", evidence(localization(overflow(dtype="bfloat16"))))
    )


def test_overflow_in_the_loss_asks_for_float32_logits():
    found = localization(overflow(phase="loss", module=""))
    assert remedies(check("NS201", evidence(found, FP16))) == ["fp32_logits", "bf16"]


def test_overflow_in_the_root_module_offers_both():
    offered = remedies(check("NS201", evidence(localization(overflow(module="")), FP16)))
    assert offered[0] == "island(float32->input)"
    assert "fp32_logits" in offered


def test_division_by_zero_in_half_precision_offers_a_wider_module():
    divided = replace(NORMS, inputs=(stats("float16"), stats("float16", zeros=1)))
    found = check("NS206", evidence(localization(divided)))
    assert any(remedy.startswith("island") for remedy in remedies(found))
    assert found.lines == ()


@pytest.mark.parametrize(
    ("kinds", "title"),
    [
        (("norm",), "division by a norm of 0"),
        (("norm", "deviation"), "division by a deviation of 0"),
        (("extreme",), "division by a range of 0"),
        (("magnitude",), "division by a magnitude of 0"),
    ],
)
def test_what_is_0_is_called_what_it_is(kinds, title):
    found = check("NS206", evidence(localization(replace(NORMS, descent=((), kinds)))))
    assert found.title == title
    assert ("all zero" in found.cause) is (kinds in (("norm",), ("extreme",)))
    assert ("x.std() + 1e-8" in found.usual_cure) is ("deviation" in kinds)


def test_an_eps_that_its_format_rounds_to_0_is_named_with_its_line():
    line = SourceLine(file="src/norm.py", line=7, function="f", text="return x * r(v + 1e-12)")
    added = event(op="aten.add.Tensor", scalars=(1e-12,), bad={}, source=line)
    found = check("NS206", evidence(localization(INVERSE_NORMS, vanished=added)))
    assert found.lines == ("its eps 1e-12 is 0 in float16, norm.py:7 return x * r(v + 1e-12)",)
    assert remedies(check("NS206", evidence(localization(NORMS)))) == ["drop_micro(1)"]


def test_masked_rows_offer_the_kernel_then_the_samples():
    found = localization(
        MASKED, positions=(Position(sample=0), Position(sample=0), Position(sample=2))
    )
    facts = RunFacts(attention="eager")
    assert remedies(check("NS202", evidence(found, facts))) == [
        "attention(sdpa)",
        "drop_sample(1:0) + drop_sample(1:2)",
        "drop_micro(1)",
    ]


@pytest.mark.parametrize(("num", "offered"), [(3, False), (4, True)])
def test_samples_are_left_out_where_they_are_no_more_than_half(num, offered):
    found = localization(MASKED, positions=(Position(sample=0), Position(sample=2)))
    batch = (BatchFact(micro=1, name="x", shape=(num, 8), dtype="float32"),)
    offers = remedies(check("NS202", evidence(found, RunFacts(), batch=batch)))
    assert ("drop_sample(1:0) + drop_sample(1:2)" in offers) is offered
    assert offers[-1] == "drop_micro(1)"


def test_scaled_gradient_offers_a_smaller_scale_before_wider_parameters():
    facts = RunFacts(scaler=65536.0, param_groups=(group("float16", "w"),))
    assert remedies(check("NS301", evidence(localization(GRADIENT), facts)))[:3] == [
        "loss_scale(0.00390625)",
        "fp32_trainables",
        "fp32_trainables + outer_autocast(float16)",
    ]


@pytest.mark.parametrize(("vocab", "told"), [(66, True), (65, True), (64, False), (None, False)])
def test_tokens_that_the_table_has_no_rows_for_ask_for_a_larger_one(vocab, told):
    facts = RunFacts(table_rows=64, vocab=vocab)
    found = check("NS502", evidence(facts=facts, batch=[batch_fact(maximum=64.0)]))
    assert any(f"resize_token_embeddings({vocab})" in line for line in found.lines) is told


def test_an_overflow_of_float32_offers_no_float32():
    wide = event(phase="backward", dtype="float32", wider="finite")
    found = check("NS301", evidence(localization(wide)))
    assert remedies(found) == ["drop_micro(1)"]
    assert "scale" not in found.usual_cure
    assert "learning rate" in found.usual_cure


@pytest.mark.parametrize(("length", "is_told"), [(math.nan, True), (None, False)])
def test_only_an_update_that_was_rehearsed_is_foretold(length, is_told):
    signal = Signal(source="param", name="weight", value=length)
    given = evidence(facts=half_head(), signals=(signal,))
    given = replace(given, incident=replace(given.incident, phase="optimizer"))
    assert (check("NS402", given) is not None) == is_told


def test_update_names_the_vanishing_eps_and_the_parameter():
    diagnosis = check("NS402", evidence(UPDATE, half_head()))
    assert "`score.weight`" in diagnosis.title
    assert "eps 1e-08 rounds to 0 in float16" in diagnosis.cause
    assert remedies(diagnosis) == [
        "fp32_trainables",
        "fp32_trainables + outer_autocast(float16)",
        "lr(0.1)",
    ]


@pytest.mark.parametrize(("above", "least", "is_said"), [(3e3, 1e-40, True), (1e30, 0.5, False)])
def test_what_an_overflowing_quotient_divides_by_is_told(above, least, is_said):
    operands = (stats("float32", absmax=above), stats("float32", absmin_nonzero=least))
    failing = event(op="aten.div.Tensor", dtype="float32", wider="finite", inputs=operands)
    found = check("NS201", evidence(localization(failing)))
    assert ("it divides by numbers as small as 1e-40" in found.lines) == is_said
    assert found.usual_cure.startswith("keep what it divides by" if is_said else "no format")


@pytest.mark.parametrize(("zeros", "said"), [(2, " where they are 0"), (3, ""), (0, "")])
def test_a_pole_at_0_is_told(zeros, said):
    failing = event(
        op="aten.lgamma.default",
        dtype="float32",
        wider="nonfinite",
        inputs=(stats("float32", zeros=zeros),),
    )
    found = check("NS204", evidence(localization(failing)))
    assert f"born here: Inf from finite inputs{said}, for these" in found.cause


@pytest.mark.parametrize(("length", "said"), [(300.0, "a smaller learning rate: "), (1e-3, "ask ")])
def test_gradients_without_a_norm_of_an_immense_rate_ask_for_a_smaller_one(length, said):
    step = StepLength(lr=length, length=length, weight=0.05)
    given = account_cases.accounts({}, {}, {}, arrived=1e20, consumed=0.0, factor=0.0)
    facts = replace(given.facts, optimizer=replace(adamw(length), step=step))
    assert check("NS307", replace(given, facts=facts)).usual_cure.startswith(said)


def test_an_eps_is_named_for_sure_only_where_a_divisor_was_seen_to_lack_it():
    """A square that leaves float16 is no division, whatever eps an optimizer has."""
    square = replace(UPDATE.first_bad, op="aten.mul.Tensor", wider="finite")
    found = check("NS402", evidence(replace(UPDATE, first_bad=square), half_head()))
    assert "eps" not in found.cause
    assert (found.confidence, "squared gradients" in found.cause) == ("likely", True)


def test_a_rate_that_is_no_number_is_not_cured_by_a_format():
    facts = RunFacts(optimizer=OptimizerFacts(name="AdamW", lr=math.nan))
    (found, *_) = diagnose(evidence(UPDATE, facts), "incident")
    assert (found.code, found.remedies) == ("NS402", ())
    assert found.usual_cure == "Make the schedule return a finite rate at every step."
    (other, *_) = diagnose(evidence(UPDATE), "incident")
    assert other.usual_cure.startswith("Store the trainable parameters in float32")


def test_a_larger_eps_is_offered_only_where_it_is_zero_by_itself():
    wide = check("NS402", evidence(UPDATE, half_head(dtype="float32", eps=0.0)))
    assert remedies(wide) == ["optimizer_eps(1e-08)", "lr(0.1)"]
    half = check("NS402", evidence(UPDATE, half_head(eps=0.0)))
    assert not any(remedy.startswith("optimizer_eps") for remedy in remedies(half))


def test_update_by_an_eight_bit_optimizer_offers_wider_state_first():
    facts = half_head(dtype="float32", state_bits=8)
    assert remedies(check("NS402", evidence(UPDATE, facts)))[:2] == [
        "fp32_optimizer_state",
        "optimizer_swap(adamw)",
    ]


@pytest.mark.parametrize(
    ("op", "inputs", "bad", "said"),
    [
        ("aten.div.Tensor", ({}, {"zeros": 4, "absmax": 0.0}), {"posinf": 4}, "`div` by 0"),
        ("aten.sqrt.default", ({},), {"nan": 2}, "`sqrt` of a negative number"),
        ("aten.div.Tensor", ({}, {}), {"posinf": 4}, "leaves the weights' format"),
        ("aten.sqrt.default", ({"nan": 1},), {"nan": 2}, "leaves the weights' format"),
    ],
)
def test_update_tells_the_optimizers_own_arithmetic_from_its_range(op, inputs, bad, said):
    read = tuple(stats("float32", **fields) for fields in inputs)
    made = event(phase="optimizer", op=op, inputs=read, outputs=(stats("float32", **bad),))
    found = localization(made, reaches=("score.weight",))
    assert said in check("NS402", evidence(found, half_head(dtype="float32"))).cause


@pytest.mark.parametrize(("wider", "confidence"), [("nonfinite", "likely"), ("finite", "possible")])
def test_what_has_no_value_in_an_update_is_its_own_arithmetic(wider, confidence):
    root = event(
        phase="optimizer",
        op="aten.pow.Tensor_Scalar",
        inputs=(stats("float32", minimum=-4e-9),),
        outputs=(stats("float32", nan=6),),
        scalars=(-0.25,),
        wider=wider,
    )
    found = localization(root, reaches=("score.weight",))
    made = check("NS402", evidence(found, half_head(dtype="float32")))
    assert made.confidence == confidence
    assert ("`pow` has no value for these numbers" in made.cause) == (wider == "nonfinite")


def test_an_update_of_a_rate_beyond_all_weights_is_no_formats_doing():
    facts = half_head()
    far = replace(facts.optimizer, step=StepLength(lr=5e4, length=5e4, weight=0.1))
    found = check("NS402", evidence(UPDATE, replace(facts, optimizer=far)))
    assert found.confidence == "likely"
    assert "moves each weight by about 5e+04" in found.cause
    assert "eps" not in found.cause
    near = replace(far, step=StepLength(lr=1e-3, length=1e-3, weight=0.1))
    assert "eps" in check("NS402", evidence(UPDATE, replace(facts, optimizer=near))).cause


@pytest.mark.parametrize(("step", "length"), [(0, 300.0), (1, 300.0), (1, 1e-3)])
def test_updates_longer_than_all_weights_come_before_a_kernel_that_fails_after_them(step, length):
    facts, at = RunFacts(optimizer=moving(length, 0.1)), StepId(run="r", step=step, micro=0)
    found = localization(event(dtype="float32", bad={"nan": 4}, wider="finite", reference="finite"))
    met = evidence(found, facts, at=at)
    is_lost = step > 0 and length > 1.0
    away, defect = check("NS404", met), check("NS602", met)
    assert (away.confidence if away is not None else None) == ("likely" if is_lost else None)
    assert defect.confidence == ("likely" if is_lost else "certain")
    assert diagnose(met, "incident")[0].code == ("NS404" if is_lost else "NS602")


@pytest.mark.parametrize(
    ("descent", "read_by", "is_bounded"),
    [
        (("data", "parameter"), ("mul",), True),
        (("parameter",), ("sub", "mul"), True),
        (("data", "parameter"), ("sum", "div"), False),
        (("data", "parameter"), ("add", "log"), False),
        (("data", "parameter", "total"), ("mul",), False),
        (("data", "log_probability", "parameter"), ("mul",), False),
        (("data",), ("mul",), False),
    ],
)
def test_a_bound_is_named_for_an_exponential_that_no_logarithm_follows(
    descent, read_by, is_bounded
):
    root = replace(EXPONENTIAL, descent=(descent,), read_by=read_by)
    lines = check("NS207", evidence(localization(root))).lines
    assert any("clamp(max=" in line for line in lines) == is_bounded


def test_update_of_a_zero_row_offers_to_initialise_it():
    found = localization(event(phase="optimizer"), reaches=("embed.weight",))
    facts = RunFacts(token_rows=(ZERO_ROWS,))
    assert "init_rows(embed.weight, mean 68-69)" in remedies(check("NS402", evidence(found, facts)))


def test_id_names_the_entry_and_the_table():
    facts = RunFacts(table_rows=64)
    raised = (Signal(source="exception", message="index out of range in self\nmore"),)
    diagnosis = check(
        "NS502", evidence(facts=facts, batch=[batch_fact(maximum=64.0)], signals=raised)
    )
    assert diagnosis.title == "id out of range: `input_ids` reaches 64, the table has 64 rows"
    assert diagnosis.cause == "index out of range in self"
    assert diagnosis.confidence == "likely"


def test_an_id_of_another_table_is_held_against_that_one():
    """Boxes on a page have a table of their own, and more rows than there are tokens."""
    table = replace(stats("float32"), shape=(1024, 32))
    ids = replace(stats("int64", absmax=1520.0, name="batch[bbox]"), shape=(4, 10))
    found = localization(event(op="aten.embedding.default", inputs=(table, ids)))
    found = replace(found, key=replace(found.key, kind="exception"))
    facts, raised = RunFacts(table_rows=100), (Signal(source="exception", message="see above"),)
    boxes = batch_fact(name="bbox", maximum=1686.0)
    diagnosis = check("NS502", evidence(found, facts, batch=[boxes], signals=raised))
    assert diagnosis.title == "id out of range: `bbox` reaches 1520, the table has 1024 rows"
    assert diagnosis.usual_cure.startswith("This is no table of tokens")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("buffer token_type_ids", "It has 64 places: cut texts to that length"),
        (None, "What it looks in is no table of the model. Its places are counted from 0 to 63"),
    ],
)
def test_places_that_are_gathered_are_no_tokens(name, cure):
    """RoBERTa counts positions from behind its padding, and gathers types of tokens by them."""
    table = replace(stats("int64", name=name), shape=(4, 64))
    ids = replace(stats("int64", absmax=64.0), shape=(4, 64))
    found = event(op="aten.gather.default", inputs=(table, ids))
    found = localization(replace(found, scalars=(1.0,)))
    found = replace(found, key=replace(found.key, kind="exception"))
    message = "index 64 is out of bounds for dimension 1 with size 64"
    raised = (Signal(source="exception", message=message),)
    diagnosis = check("NS502", evidence(found, RunFacts(table_rows=384), signals=raised))
    assert diagnosis.usual_cure.startswith(cure)


@pytest.mark.parametrize(
    ("at", "losses", "since"),
    [
        (0, {}, " before the first step"),
        (4, {}, " before this step; the update is not known"),
        (4, {2: 0.5}, "; step 2 had a finite loss; the update is not known"),
        (0, {0: 0.5}, "; an earlier forward pass of this step had a finite loss"),
    ],
)
def test_how_long_weights_have_been_bad(at, losses, since):
    given = evidence(localization(event(), origin="from_param", culprit="w"))
    raw = Series(name="loss_raw", steps=tuple(losses), values=tuple(losses.values()))
    then = replace(given.incident, at=StepId(run="r", step=at), history=(raw,))
    found = check("NS401", replace(given, incident=then))
    assert found.cause == f"1 parameter not finite{since}"


@pytest.mark.parametrize(
    ("width", "total", "code"), [(1, 0.0, "NS503"), (8, 0.0, "NS204"), (1, 3.0, "NS204")]
)
def test_a_loss_of_texts_that_are_one_token_long(width, total, code):
    read = tuple(stats("float32", shape=(), absmax=a, zeros=int(a == 0.0)) for a in (total, 0.0))
    failed = event(op="aten.div.Tensor", dtype="float32", wider="nonfinite", bad={"nan": 1})
    failed = replace(failed, inputs=read, descent=(("log_probability",), ("constant",)))
    texts = [replace(batch_fact(n), shape=(2, width)) for n in ("input_ids", "labels")]
    found = diagnose(evidence(localization(failed), batch=texts), "incident")[0]
    assert found.code == code
    if code == "NS503":
        assert found.cause.startswith("every text of `labels` [2, 1] is one token long")


def test_labels_of_which_there_are_none_are_not_left_out():
    read = (stats("float32", shape=(0, 8)), stats("int64", shape=(0,), absmax=0.0))
    made = (stats("float32", shape=(), nan=1), stats("float32", shape=(), absmax=0.0))
    failed = event(op="aten.nll_loss_forward.default", dtype="float32", inputs=read, outputs=made)
    found = check("NS503", evidence(localization(failed)))
    assert found.title == "no supervised token in the micro-batch"
    assert found.cause == "no token of the micro-batch reaches the loss: its mean is 0/0"


def test_an_adapter_that_is_frozen_is_to_be_loaded_to_be_trained():
    given = setup(param_groups=(FROZEN,), gradient_path=replace(PATH, num_trainable=0))
    adapted = replace(given.facts, adapter=AdapterFacts(kind="LORA"))
    assert any("attach adapters" in line for line in check("NS114", given).lines)
    found = check("NS114", replace(given, facts=adapted))
    assert any("`is_trainable=True`" in line for line in found.lines)


@pytest.mark.parametrize(
    ("clip", "eps", "named"),
    [(1e-10, 1e-8, "clipping at 1e-10"), (1.0, 1e8, "the optimizer's eps 1e+08")],
)
def test_what_makes_elements_vanish_beside_an_eps(clip, eps, named):
    optimizer = replace(adamw(1e-4), eps=eps)
    found = check("NS113", setup(clip=clip, optimizer=optimizer, gradient_path=PATH))
    assert found.title == f"out of range: {named}"


@pytest.mark.parametrize(("bad", "guards"), [({"posinf": 3, "neginf": 5}, 0), ({"nan": 8}, 1)])
def test_what_is_not_0_over_a_number_0_of_the_program_is_not_guarded(bad, guards):
    outputs, line = (stats("float32", **bad),), SourceLine(file="t.py", line=5, function="f")
    made = event(op="aten.div.Tensor", outputs=outputs, scalars=(0.0,), source=line)
    made = replace(made, wider="bad", inputs=(stats("float32"),), phase="loss")
    found = check("NS204", evidence(localization(made)))
    assert "the number 0 of the program" in found.cause
    assert (len(found.remedies) > 0) == bool(guards)
    assert found.usual_cure.startswith("Keep that number from 0")


def test_a_weight_of_a_model_beside_the_trained_one_is_no_updates_doing():
    found = localization(event(), origin="from_param", culprit="Ref.w", of_another_model=True)
    raw = Series(name="loss_raw", steps=(2,), values=(0.5,))
    given = evidence(found)
    given = replace(given, incident=replace(given.incident, history=(raw,)))
    said = check("NS401", given)
    assert (said.where, said.remedies) == ("Ref.w", ())
    assert "beside the one it trains" in said.cause
    assert said.usual_cure.startswith("Load that model again")


@pytest.mark.parametrize(
    ("dtype", "bad", "cure"),
    [
        ("float16", {"posinf": 3}, "Load that model in bfloat16"),
        ("float16", {"nan": 1, "posinf": 3}, "Load that model again"),
        ("float32", {"posinf": 3}, "Load that model again"),
    ],
)
def test_weights_that_are_infinite_in_float16_may_be_finite_elsewhere(dtype, bad, cure):
    made = replace(event(), inputs=(stats("float16"), stats(dtype, **bad)))
    found = localization(made, origin="from_param", culprit="Ref.w", of_another_model=True)
    assert check("NS401", evidence(found)).usual_cure.startswith(cure)


def test_what_is_evaluated_may_be_no_model_that_the_losses_are_of():
    """An average of weights, say: no update of this training need have broken it."""
    raw = Series(name="loss_raw", steps=(2,), values=(0.5,))
    given = evidence(localization(event(), origin="from_param", culprit="w"))
    then = replace(given.incident, phase="evaluate", history=(raw,))
    found = check("NS401", replace(given, incident=then))
    assert found.cause.startswith("1 parameter not finite in the model that was evaluated")
    assert "an average of weights or a copy" in found.usual_cure
    half = replace(event(), inputs=(stats("float16", posinf=3), stats("float16")))
    half = replace(evidence(localization(half, origin="from_param", culprit="w")), incident=then)
    assert check("NS401", half).usual_cure.startswith("Evaluate that model in bfloat16")
    loaded = RunFacts(odd_weights=(stats("float32", name="w", nan=8),))
    found = check("NS401", replace(given, incident=replace(then, facts=loaded)))
    assert found.cause == "1 parameter not finite before the first step"


def test_another_attention_kernel_is_no_advice_for_what_nobody_tries():
    absorbed, facts = overflow(dtype="float32"), RunFacts(attention="sdpa")
    sampled = Evidence(
        facts=facts, localization=localization(None, "unknown", absorbed=(absorbed,))
    )
    assert check("NS209", sampled).remedies == ()
    failed = evidence(localization(absorbed, origin="absorbed"), facts, signals=())
    assert (Atom(remedy="attention", value="eager"),) in check("NS209", failed).remedies


def test_a_row_that_nothing_read_was_bad_all_along():
    raw = Series(name="loss_raw", steps=(2,), values=(0.5,))
    loaded = RunFacts(odd_weights=(stats("float32", name="w", nan=8),))
    given = evidence(localization(event(), origin="from_param", culprit="w"), loaded)
    found = check("NS401", replace(given, incident=replace(given.incident, history=(raw,))))
    assert found.cause == "1 parameter not finite before the first step"


@pytest.mark.parametrize(
    ("losses", "norms", "loaded", "code"),
    [
        ({3: 0.5}, {3: 1.0}, (), "NS402"),
        ({3: 0.5}, {}, (), "NS401"),
        ({3: 0.5}, {3: math.inf}, (), "NS401"),
        ({2: 0.5}, {2: 1.0}, (), "NS401"),
        ({3: 0.5}, {3: 1.0}, (stats("float32", name="w", nan=8),), "NS401"),
    ],
)
def test_weights_that_a_finite_step_leaves_broken_are_its_updates(losses, norms, loaded, code):
    found = localization(event(), origin="from_param", culprit="w")
    given = evidence(found, RunFacts(odd_weights=loaded))
    history = tuple(
        Series(name=name, steps=tuple(values), values=tuple(values.values()))
        for name, values in (("loss_raw", losses), ("grad_norm", norms))
    )
    at = StepId(run="r", step=4)
    then = replace(given.incident, at=at, history=history, bad_params=("w",))
    for seen in (found, None):  # a step that cannot be run again has no localization
        known = replace(given, incident=then, localization=seen)
        said = [one.code for one in diagnose(known, "incident")]
        assert [one for one in said if one in ("NS401", "NS402")] == [code]


@pytest.mark.parametrize("is_over", [False, True])
def test_since_when_rows_that_no_batch_has_read_are_broken_is_not_said(is_over):
    lookup = event(op="aten.embedding.default")
    found = localization(lookup, origin="from_param", culprit="w")
    raw, norm = (Series(name=n, steps=(3,), values=(0.5,)) for n in ("loss_raw", "grad_norm"))
    given = evidence(None if is_over else found)
    then = replace(
        given.incident,
        at=StepId(run="r", step=4),
        phase="optimizer" if is_over else "forward",
        history=(raw, norm),
        bad_params=("w",),
    )
    best = diagnose(replace(given, incident=then), "incident")[0]
    assert (best.code, best.confidence) == ("NS401", "certain")
    assert "since" not in best.title + best.cause


def refused(op, *inputs, message, **fields):
    """An operation that raised."""
    raised = event(op=op, inputs=inputs, outputs=(), **fields)
    key = FailureKey(kind="exception", phase="forward", op=op)
    signal = Signal(source="exception", message=message)
    return evidence(localization(raised, key=key), signals=(signal,))


def test_an_operation_that_raises_is_undefined_there_too():
    message = "normal expects all elements of std >= 0.0"
    found = check("NS204", refused("aten.normal.Tensor_Tensor", stats(), stats(), message=message))
    assert (found.title, found.cause) == ("`normal` refuses its inputs", message)


def test_a_number_of_a_mask_that_its_format_cannot_hold():
    message = "value cannot be converted to type at::Half without overflow"
    fill = "aten.masked_fill.Scalar"
    found = check("NS203", refused(fill, stats(), stats("bool"), message=message, scalars=(-1e9,)))
    assert found.cause == "-1000000000 is to hide scores; float16 ends at 65504"
    held = refused(fill, stats("float32"), stats("bool"), message=message, scalars=(-1e9,))
    assert check("NS203", held) is None


def lookup(op="aten.embedding.default", asked=64.0, message="index out of range in self"):
    """An operation that raised on a table of 64 rows."""
    read = (stats("float32", shape=(64, 8)), stats("int64", shape=(2, 4), absmax=asked))
    raised = event(op=op, dtype="float32", inputs=read, outputs=())
    key = FailureKey(kind="exception", phase="forward", op=op)
    signal = Signal(source="exception", message=message)
    return evidence(localization(raised, key=key), signals=(signal,))


def test_the_table_and_the_ids_are_what_the_operation_read():
    found = check("NS502", lookup())
    assert found.confidence == "certain"
    assert found.confirmed == "`embedding` was asked for 64; what it looks in has 64 rows"
    assert check("NS502", lookup(asked=63.0)).confidence == "possible"
    assert check("NS502", lookup("aten.cat.default")) is None


@pytest.mark.parametrize("op", ["aten.index_put_.default", "aten.index.Tensor"])
def test_the_message_says_which_of_several_indices_is_out_of_range(op):
    """One-hot targets: `t[range(num), classes] = 1`."""
    rows, classes = (stats("int64", shape=(8,), absmax=most) for most in (7.0, 3.0))
    said = "index 3 is out of bounds for dimension 1 with size 3"
    found = check("NS502", refused(op, stats(shape=(8, 3)), rows, classes, message=said))
    assert found.confidence == "certain"
    assert found.confirmed.endswith("was asked for 3; what it looks in has 3 rows")
    assert "counted from 0 to 2" in found.usual_cure


def test_no_id_is_blamed_for_what_a_division_made():
    batch, facts = [batch_fact("loss7", maximum=53.0)], RunFacts(table_rows=32)
    divided = event(op="aten.div.Tensor", dtype="float32", bad={"nan": 1})
    assert check("NS502", evidence(localization(divided), facts, batch=batch)) is None
    for looks in ("aten.nll_loss_forward.default", "aten._ctc_loss.default"):
        looked = event(op=looks, dtype="float32", bad={"nan": 1})
        assert check("NS502", evidence(localization(looked), facts, batch=batch)) is not None
    foreign = event(op="liger.cross_entropy.default", dtype="float32", bad={"nan": 1})
    assert check("NS502", evidence(localization(foreign), facts, batch=batch)) is not None


@pytest.mark.parametrize("origin", ["from_batch", "from_buffer", "from_param"])
def test_no_id_is_blamed_for_what_was_bad_before_the_step(origin):
    """Targets of -1 that the model's own loss leaves out, beside advantages of 0 / 0."""
    batch = [batch_fact("targets", minimum=-1.0), batch_fact("loss2", dtype="float32", num_bad=4)]
    weighed = event(op="aten.mul.Tensor", dtype="float32", bad={"nan": 1}, phase="loss")
    assert check("NS502", evidence(localization(weighed, origin), batch=batch)) is None
    assert check("NS502", evidence(localization(None, "unknown"), batch=batch)) is not None


def test_an_infinite_rate_makes_no_other_one_next_to_nothing():
    given = setup(
        optimizer=moving(math.inf, 0.02),
        rates=RateFacts(num_used=16, num_dead=15, highest=math.inf, coming=0.2, planned=True),
    )
    found = check("NS113", given)
    assert (found.title, found.cause) == (
        "out of range: learning rate inf",
        "an update makes every weight NaN",
    )
    assert not found.lines


@pytest.mark.parametrize(("made_of", "line"), [(1e-2, 20), (math.inf, 19), (None, 19)])
def test_an_infinite_rate_is_the_line_that_makes_it_so(made_of, line):
    """A schedule's, of a rate that was finite; else that which the optimizer was given."""
    at = {n: SourceLine(file="t.py", line=n, function="<module>", text="...") for n in (19, 20)}
    optimizer = OptimizerFacts(name="Adam", lr=math.inf, scheduled=made_of)
    found = check("NS113", setup(optimizer=optimizer, optimizer_at=at[19], schedule_at=at[20]))
    assert found.confidence == "certain"
    assert found.where == f"t.py:{line}"


@pytest.mark.parametrize("end", [1.0, -1.0])
def test_a_gradient_of_advantages_at_the_end_of_a_format_is_the_rewards_fault(end):
    """An infinite reward is made the largest number that there is, not one that is finite."""
    reward = Signal(source="reward", name="score", value=math.inf, message="1 of 4 rewards")
    overflown = localization(event(phase="backward", dtype="float32", wider="finite"))

    def codes(largest):
        low, high = sorted((0.0, end * largest))
        fact = batch_fact("advantages", "float32", minimum=low, maximum=high)
        given = evidence(overflown, signals=(reward,), batch=[fact])
        return [one.code for one in diagnose(given, "incident")]

    assert codes(FORMAT_MAX["float32"])[0] == "NS704"
    assert "NS301" not in codes(FORMAT_MAX["float32"])
    assert codes(5.0)[0] == "NS301"  # the trainer has clipped it


def test_the_line_that_made_a_row_bad_is_said():
    line = SourceLine(file="/x/data.py", line=7, function="prepare", text="return x / x.std()")
    made_of = BatchRows(data="train", rows=(4, 5), unmade_at=line)
    given = evidence(batch=[batch_fact("pixels", "float32", num_bad=4)])
    given = replace(given, incident=replace(given.incident, rows=made_of))
    assert "made so at data.py:7: `return x / x.std()`" in check("NS501", given).lines


def test_only_a_table_of_tokens_grows_with_the_tokenizer():
    def cure(tokens, name):
        given = lookup()
        facts = replace(given.incident.facts, table_rows=tokens)
        found = given.localization
        table, ids = found.first_bad.inputs
        raised = replace(found.first_bad, inputs=(table, replace(ids, name=name)))
        incident = replace(given.incident, facts=facts)
        known = replace(given, incident=incident, localization=replace(found, first_bad=raised))
        return check("NS502", known).usual_cure

    assert not cure(64, "batch[input_ids]")
    assert not cure(None, None)
    assert cure(96, "batch[token_type_ids]").startswith("This is no table of tokens")
    assert cure(96, None).startswith("It has 64 places")


def test_a_label_that_losses_leave_out_is_no_row_that_is_missing():
    gather, size = "aten.gather.default", 100.0
    said = "index -100 is out of bounds for dimension 0 with size 64"
    found = check("NS502", lookup(gather, asked=size, message=said))
    assert found.confirmed == "`gather` was asked for -100; what it looks in has 64 rows"
    assert "labels.clamp(min=0)" in found.usual_cure
    labels = batch_fact("labels", minimum=-size, maximum=60.0)
    given = lookup(asked=size)
    given = replace(given, incident=replace(given.incident, batch=(labels,)))
    assert "labels.clamp(min=0)" in check("NS502", given).usual_cure
    beyond = lookup(gather, asked=size, message=said.replace("-", ""))
    assert "a label too many" in check("NS502", beyond).usual_cure
    unmarked = lookup("aten.nll_loss_forward.default", 1.0, "Target -1 is out of bounds.")
    assert "with -100" in check("NS502", unmarked).usual_cure
    last = lookup(asked=1.0, message="Target -1 is out of bounds.")
    assert check("NS502", last).confirmed.startswith("`embedding` was asked for -1;")


def test_a_place_below_0_is_no_row_however_far_the_others_reach():
    given = lookup(asked=9.0, message="index out of range in self")
    raised = given.localization.first_bad
    ids = replace(raised.inputs[1], minimum=-1.0, name="batch[position_ids]")
    raised = replace(raised, inputs=(raised.inputs[0], ids))
    given = replace(given, localization=replace(given.localization, first_bad=raised))
    found = check("NS502", given)
    assert found.title == "id out of range: `position_ids` holds -1"
    assert found.confirmed == "`embedding` was asked for -1; what it looks in has 64 rows"
    assert "`clamp(min=0)`" in found.usual_cure
    assert found.confidence == "certain"


def test_collapse_names_the_operation_where_it_was_found():
    given = evidence(localization(overflow()), signals=(Signal(source="scaler"),))
    assert "`mul` in `model.layers.1.mlp`" in check("NS302", given).lines[0]


@pytest.mark.parametrize(
    ("values", "falls"),
    [((), 0), ((4.0,), 0), ((4.0, 2.0), 1), ((4.0, 8.0, 4.0, 2.0), 2), ((4.0, 2.0, 2.0), 0)],
)
def test_falls_are_counted_from_the_end(values, falls):
    assert consecutive_falls(values) == falls


def test_not_established_says_what_was_ruled_out_and_what_to_try():
    replay = Replay(incident="0001", fidelity="bitwise", runs=2)
    found = localization(event(phase="backward"), blind_spots=("calls into a C++ extension",))
    diagnosis = check("NS000", evidence(found, batch=[batch_fact()], replay=replay))
    assert diagnosis.confidence == "possible"
    assert diagnosis.lines == (
        "ruled out: the weights; all were finite before the step",
        "ruled out: the data; the batch is finite",
        "ruled out: the forward pass; it is finite",
        "first seen in `mul`, backward; origin born_here",
        "ruled out: chance; the replay fails in the same way",
        "next experiment: look at what the recorder could not see: calls into a C++ extension",
    )


def test_not_established_claims_nothing_it_did_not_see():
    lines = check("NS000", evidence()).lines
    assert len(lines) == 1
    assert lines[0].startswith("next experiment: replay the step")


def test_growth_is_named_where_it_was_largest():
    small = event(inputs=(stats(absmax=1.0),), outputs=(stats(absmax=3.0),), module="a")
    large = event(inputs=(stats(absmax=2.0),), outputs=(stats(absmax=120.0),), module="b")
    found = localization(overflow(), growth=(small, large))
    assert check("NS201", evidence(found)).lines == ("range grew x60 at b",)


def test_range_row_at_the_end_of_the_format_is_certain():
    row = RangeRow(module="m", op="o", dtype="float16", absmax=65504.0, headroom_bits=0.0)
    assert check("NS101", Evidence(facts=FP16, ranges=(row,))).confidence == "certain"


def test_facts_of_the_incident_stand_in_for_standing_facts():
    met = incident(half_head())
    assert check("NS102", Evidence(incident=met)).code == "NS102"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"inputs": (stats("float32"),)}, "born here: NaN from finite inputs"),
        (
            {"inputs": (stats("float32", minimum=-0.5),)},
            "born here: NaN from finite inputs, the least of them -0.5",
        ),
        ({"inputs": (stats("float32", posinf=1),)}, "born here: NaN from an Inf that it reads"),
        ({"scalars": (float("nan"),)}, "born here: NaN from the constant nan"),
    ],
)  # fmt: skip
def test_what_an_undefined_operation_was_given(fields, said):
    given = event(
        op="aten.mul.Tensor", dtype="float32", bad={"nan": 1}, wider="nonfinite", **fields
    )
    (found,) = [d for d in diagnose(evidence(localization(given)), "incident") if d.code == "NS204"]
    assert found.cause == f"{said}, for these inputs in any format"


def test_an_exception_is_no_gradient_that_a_failure_reaches():
    found = check("NS304", evidence(localization(SQRT, reaches=("exception", "loss", "w"))))
    assert "reaches the gradient of `w`" in found.lines


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        (
            {"forward_outputs": (stats("float32", absmax=0.0),)},
            "`sqrt` is finite, its derivative is not; no wider format has one for these numbers",
        ),
        (
            {"forward_op": "aten.log.default", "forward_outputs": (stats("float32", neginf=3),)},
            "`log` came to -Inf in the forward pass already: its derivative there has no value",
        ),
        ({}, "the loss is finite, its derivative is not"),
        (
            {
                "op": "aten.div_.Tensor",
                "forward_op": "aten._linalg_eigh.default",
                "forward_outputs": (stats("float32"),),
                "inputs": (stats("float32"), stats("float32", zeros=6)),
            },
            "`_linalg_eigh` is finite; its derivative divides by the differences of the eigenvalues",
        ),
        ({"inputs": (stats("float32", posinf=5),)}, "its derivative reads what is not finite"),
    ],
)
def test_what_is_said_of_a_derivative_is_what_was_seen(fields, cause):
    found = check("NS304", evidence(localization(replace(SQRT, **fields))))
    assert found.cause.startswith(cause)


def test_a_backward_that_somebody_wrote_is_no_derivative():
    """The forward may guard against a norm of 0, and its backward not."""
    written = replace(SQRT, forward_op="FusedNorm", wider="nonfinite")
    found = check("NS304", evidence(localization(written)))
    assert found.title.startswith("backward of `FusedNorm` is undefined in ")
    assert found.cause.startswith("the formula of its own backward has no value in ")
    assert "derivative" not in found.title + found.cause


def test_weights_that_a_decay_makes_grow_are_no_matter_of_the_learning_rate():
    away = training_cases.climbing(
        training_cases.LOSSES, training_cases.GRADIENT_NORMS, training_cases.EXPLODED
    )
    decayed = Series(name="decayed", steps=(0, 1), values=(10.0, 10.0))
    found = check("NS404", replace(away, series=(*away.series, decayed)))
    assert "each update multiplies every weight by -9, beside its gradient" in found.cause
    said = (found.cause, *found.lines, found.usual_cure)
    assert not any("learning rate" in one for one in said)
    assert found.remedies[0] == (Atom(remedy="weight_decay", value="0.01"),)
    (first, *_) = check("NS404", away).remedies
    assert [atom.remedy for atom in first] == ["lr"]


def test_no_decay_is_blamed_that_is_usual():
    away = training_cases.climbing(
        training_cases.LOSSES, training_cases.GRADIENT_NORMS, training_cases.EXPLODED
    )
    decayed = Series(name="decayed", steps=(0, 1), values=(3.0, 3.0))
    rate = OptimizerFacts(name="AdamW", lr=60.0, weight_decay=0.05)
    facts = replace(away.incident.facts, optimizer=rate)
    away = replace(away, incident=replace(away.incident, facts=facts), facts=facts)
    found = check("NS404", replace(away, series=(*away.series, decayed)))
    assert "at a learning rate of 60" in found.cause
    assert [atom.remedy for atom in found.remedies[0]] == ["lr"]


@pytest.mark.parametrize(
    ("outcome", "is_named"), [("not_applicable", True), ("same_failure", False)]
)
def test_a_decay_that_norms_hide_from_the_loss(outcome, is_named):
    """Of an optimizer whose decay has another name no smaller one can be tried."""
    away = training_cases.climbing(
        (4.2,) * 8, (1.0,) * 8, training_cases.EXPLODED, odd_weights=training_cases.HEAVY
    )
    assert check("NS404", away) is None
    decayed = Series(name="decayed", steps=(0, 1), values=(3.0, 3.0))
    trials = (
        Trial(atoms=(Atom(remedy="weight_decay", value="0"),), outcome=outcome),
        Trial(atoms=(Atom(remedy="lr", value="0.01"),), outcome="pass", message="it is finite"),
    )
    grown = replace(away, series=(*away.series, decayed), trials=trials)
    found = check("NS404", grown)
    assert (found is not None) == is_named
    if found is not None:
        assert "multiplies every weight by -2, beside its gradient" in found.cause
        assert found.confidence == "certain"


@pytest.mark.parametrize(
    ("by_row", "drawn"), [(True, "at row 1 (row 13 of train)"), (False, "at row 1")]
)
def test_rows_of_a_preference_are_named_by_what_has_one_value_each(by_row, drawn):
    margin = replace(batch_fact("margin", "float32", num_bad=1, bad_rows=(1,)), shape=(4,))
    given = evidence(localization(event(inputs=(stats("float32", nan=1),)), "from_batch"))
    rows = BatchRows(data="train", rows=(6, 13, 18, 24), in_order=False, by_row=by_row)
    texts = replace(batch_fact("input_ids", "int64"), shape=(8, 16))
    incident = replace(given.incident, rows=rows, batch=(texts, margin))
    found = check("NS501", replace(given, incident=incident))
    assert found.lines[0].endswith(drawn)
    assert found.confidence == ("certain" if by_row else "likely")


def test_the_schedule_that_gives_no_rate_is_named():
    source = SourceLine(file="train.py", line=8, function="f", text="s = LambdaLR(o, decay)")
    broken = evidence(localization(event(phase="optimizer"), reaches=("w",)))
    facts = RunFacts(optimizer=OptimizerFacts(name="AdamW", lr=math.nan), schedule_at=source)
    found = check("NS402", replace(broken, incident=replace(broken.incident, facts=facts)))
    assert found.where == "train.py:8"
    assert found.lines[0] == "train.py:8  s = LambdaLR(o, decay)"


def test_the_schedule_that_raised_the_rate_is_named():
    away = training_cases.climbing(
        training_cases.LOSSES, training_cases.GRADIENT_NORMS, training_cases.EXPLODED
    )
    rates = Series(name="lr", steps=(0, 1, 2), values=(0.01, 0.1, 1.0))
    source = SourceLine(file="train.py", line=8, function="f", text="s = LambdaLR(o, grow)")
    facts = replace(away.incident.facts, schedule_at=source)
    raised = replace(
        away, series=(*away.series, rates), incident=replace(away.incident, facts=facts)
    )
    said = "raised from 0.01 to 1 by the schedule that train.py:8 makes: `s = LambdaLR(o, grow)`"
    assert any(said in line for line in check("NS404", raised).lines)
    steady = replace(raised, series=(*away.series, replace(rates, values=(0.1, 0.1, 0.1))))
    assert not any("raised" in line for line in check("NS404", steady).lines)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((0.1,) * 6 + (1e22, 0.1), "weights from before step 6"),
        ((0.1,) * 6 + (1e22, 1e22), "weights from before step 6"),
        ((0.1,) * 6 + (5.0, 0.1), None),
        ((0.0,) * 4 + (0.1,) * 4, None),
        (tuple(0.1 * 1.5**n for n in range(9)), "each update multiplies it by 1.5"),
        (tuple(0.1 * n for n in range(1, 10)), None),
    ],
)
def test_a_rate_that_is_next_to_none_before_it_or_rises_by_a_factor_has_no_smaller_one(rates, said):
    climbs = training_cases.LOSSES if len(rates) > 8 else (4.2,) * 8
    away = training_cases.climbing(
        climbs, (1.0,) * len(climbs), training_cases.EXPLODED, odd_weights=training_cases.HEAVY
    )
    met = replace(away.incident, at=replace(away.incident.at, step=8))
    lr = Series(name="lr", steps=tuple(range(len(rates))), values=rates)
    found = check("NS404", replace(away, incident=met, series=(*away.series, lr)))
    if said is None and len(rates) == 8:
        assert found is None
        return
    assert found.confidence == ("likely" if len(rates) == 8 else "possible")
    assert (said or "") in found.usual_cure
    assert bool(found.remedies) == (said is None)


LINE = SourceLine(file="train.py", line=8, function="f", text="made = ...")


@pytest.mark.parametrize(
    ("op", "shape", "bad", "is_written", "title", "cure"),
    [
        ("aten.index.Tensor", (64, 1), {"nan": 1}, False, "variable", "(row 9 is one)"),
        ("aten.index.Tensor", (64, 1), {"neginf": 1}, False, "variable", "line 8 (row 9 is one)"),
        ("aten.sub.Tensor", (8,), {"nan": 1}, False, "variable", "in a column"),
        ("aten.mul.Tensor", (4,), {"posinf": 1}, False, "variable", "0 in line 8: count with"),
        ("aten.mul.Tensor", (), {"neginf": 1}, True, "constant", "a large finite number in line 8"),
    ],
)
def test_what_a_variable_holds_and_how_it_is_read_says_what_to_mend(
    op, shape, bad, is_written, title, cure
):
    read = event("float32", op=op, inputs=(stats("float32", shape=shape, **bad),))
    place = localization(
        read, "from_constant", culprit="y", made=LINE, made_before=True, is_written=is_written
    )
    found = check("NS506", evidence(place, batch=[batch_fact("y", bad_rows=(9,))]))
    assert found.title == f"{title} not finite: `y`"
    assert cure in found.usual_cure


@pytest.mark.parametrize(
    ("op", "read", "is_advised"),
    [
        ("aten.linalg_cholesky_ex.default", {"shape": (4, 8, 8)}, True),
        ("aten.linalg_inv_ex.default", {"shape": (8, 8)}, True),
        ("aten.linalg_inv_ex.default", {"shape": (8, 8), "nan": 1}, False),
        ("aten._linalg_svd.default", {"shape": (8, 4)}, False),
        ("aten.normal.Tensor_float", {"shape": (8, 8)}, False),
    ],
)
def test_a_matrix_that_is_refused_gets_something_on_its_diagonal(op, read, is_advised):
    said = "the input matrix is singular."
    found = check("NS204", refused(op, stats("float32", **read), message=said, dtype="float32"))
    assert any("torch.eye" in line for line in found.lines) == is_advised


@pytest.mark.parametrize(
    ("hidden", "title", "advice"),
    [
        ("row", "`sum` of a row that is hidden in full", "give each row something"),
        ("chosen", "`sum` picks what is hidden", "the choice or the mask is wrong"),
        ("counted", "`sum` counts what is hidden", "logp.masked_fill(hidden, 0)"),
    ],
)
def test_what_is_hidden_has_no_result_that_another_form_could_give(hidden, title, advice):
    read = stats("float32", neginf=2)
    failed = event("float32", op="aten.sum.default", inputs=(read,), wider="nonfinite")
    found = check("NS204", evidence(localization(failed, hidden=hidden)))
    assert (found.title, found.confidence) == (title, "certain")
    assert advice in found.usual_cure
    assert {atom.remedy for atoms in found.remedies for atom in atoms} <= {"drop_micro"}


def test_a_buffer_that_a_step_writes_to_is_no_data():
    held = stats("float32", shape=(32, 4), nan=96, name="buffer vq.codebook")
    read = event("float32", op="aten.index.Tensor", inputs=(held,))
    place = localization(read, "from_constant", culprit="self.codebook", made=LINE)
    found = check("NS506", evidence(place))
    assert "given its values in line 8" in found.lines[0]
    assert found.usual_cure.startswith("Look at what line 8 reads")


def test_of_two_buffers_that_are_bad_each_is_said_to_hold_its_own():
    """A batch with an Inf leaves infinities in the one and NaN in the other."""
    mean = stats("float32", shape=(16,), posinf=7, neginf=9, name="buffer 1.running_mean")
    var = stats("float32", shape=(16,), nan=16, name="buffer 1.running_var")
    read = event("float32", op="aten.native_batch_norm.default", inputs=(mean, var))
    for culprit, holds in (("1.running_mean", "+Inf x 7, -Inf x 9"), ("1.running_var", "NaN x 16")):
        found = check("NS506", evidence(localization(read, "from_buffer", culprit=culprit)))
        assert f"`{culprit}` holds {holds}, " in found.cause


def test_a_divisor_that_has_a_name_is_named():
    divisor = stats("float32", zeros=1, shape=(8,), name="batch[std]")
    failed = replace(BY_ZERO, inputs=(stats("float32"), divisor))
    assert (
        "by `std` that is 0 in 1 of 8 elements"
        in check("NS204", evidence(localization(failed))).cause
    )


def test_a_moment_that_was_lost_before_it_was_saved_needs_no_other_optimizer():
    lost = StateFault(name="w:exp_avg_sq", kind="vanished", num_bad=4)
    adam = OptimizerFacts(name="Adam", state_faults=(lost,))
    found = check("NS403", Evidence(facts=RunFacts(optimizer=adam)))
    assert found.remedies == ()
    coarse = replace(adam, state_bits=8)
    assert check("NS403", Evidence(facts=RunFacts(optimizer=coarse))).remedies != ()


def test_tensors_without_a_gradient_are_all_counted():
    path = GradientPath(
        num_tensors=14, num_trainable=14, num_reached=2, unreached=tuple("abcdefgh")
    )
    found = check("NS114", Evidence(facts=RunFacts(gradient_path=path)))
    assert found.cause == (
        "after one backward 12 of 14 trainable tensors have none: `a`, `b`, `c` and 9 more"
    )


def test_what_a_hook_computes_is_no_derivative():
    by_norm = replace(NORMS, phase="backward", node="TanhBackward0")
    (found,) = diagnose(evidence(localization(by_norm)), "incident")
    assert (found.code, found.confidence) == ("NS206", "likely")
    derived = replace(by_norm, forward_op="aten.tanh.default")
    assert [one.code for one in diagnose(evidence(localization(derived)), "incident")] == ["NS304"]


def test_the_largest_argument_of_an_exponential_is_not_a_negative_one():
    read = stats("float32", absmax=779.0, minimum=-779.0)
    assert check("NS207", evidence(localization(replace(EXPONENTIAL, inputs=(read,))))).cause == (
        "an argument too large; float32 ends at 3.40282e+38"
    )


def test_a_nan_that_no_op_made_is_looked_for_outside_torch():
    replay = Replay(incident="1", fidelity="bitwise", runs=2)
    (found,) = diagnose(evidence(localization(HANDED_ON), replay=replay), "incident")
    assert found.code == "NS000"
    assert found.lines[-1].startswith("next experiment: look for what made its NaN: no op of torch")


def test_float32_runs_are_not_offered_float32():
    replay = Replay(incident="1", fidelity="bitwise", runs=2)
    found = diagnose(evidence(replay=replay), "incident")[0]
    assert (found.code, found.remedies) == ("NS000", ())
    facts = RunFacts(autocast="bfloat16")
    autocast = diagnose(evidence(facts=facts, replay=replay), "incident")[0]
    assert autocast.remedies == ((Atom(remedy="fp32_logits"),),)


def test_a_guess_that_cannot_be_tried_is_not_offered():
    found = diagnose(evidence(facts=RunFacts(autocast="float16")), "incident")[0]
    assert (found.code, found.remedies) == ("NS000", ())


def test_labels_that_are_ignored_are_no_ids():
    ignored = batch_fact("loss1", minimum=-100.0, num_supervised=3)
    assert diagnose(evidence(batch=[ignored]), "incident")[0].code == "NS000"
    ids = batch_fact("input_ids", minimum=-100.0)
    assert diagnose(evidence(batch=[ids]), "incident")[0].code == "NS502"


def test_a_dead_process_is_told_by_its_last_operation():
    told = check("NS601", ended("signal", ("SIGFPE", ""), ("frame", "m.py:3 in f"), op=GEMM))
    assert told.title == "process killed by SIGFPE in `mm`"
    assert told.where == "model.layers.1.mlp"
    assert told.lines == (
        "last operation aten.mm.default: bfloat16 [4]",
        "at m.py:3 a @ b",
        "innermost Python frame m.py:3 in f",
    )
    unknown = check("NS601", ended("signal", ("SIGSEGV", "")))
    assert unknown.title == "process killed by SIGSEGV"
    assert "--record" in unknown.lines[-1]


def test_a_process_killed_from_outside_blames_no_operation():
    told = check("NS601", ended("signal", ("SIGKILL", ""), op=GEMM))
    assert (told.title, told.where) == ("process killed by SIGKILL", "")
    assert told.lines[0].startswith("it was at aten.mm.default")


def test_an_optimizer_that_squares_nothing_is_told_nothing_of_squares():
    found = check("NS102", Evidence(facts=half_head(eps=None, name="SGD", per_rate=None)))
    assert (found.confidence, found.cause) == (
        "possible",
        "an update below 1/4096 of a float16 weight is rounded away",
    )
    update = check("NS402", evidence(UPDATE, half_head(eps=None, name="SGD", per_rate=None)))
    assert "squared" not in update.cause


def test_a_backward_that_ignores_what_it_is_given_is_a_defect_of_its_function():
    row = BackwardRow(name="Fused", num=92, apart=0.718, line="loss.py:32: return ctx.made")
    found = check("NS602", probed(backwards=(row,)))
    assert (found.code, found.confidence) == ("NS602", "certain")
    assert found.title == "the backward of `Fused` ignores what it is given"
    assert found.confirmed == "differences of its forward are another gradient, 72 % away"
    assert row.line in found.lines
    assert check("NS602", probed(lr=1e-3)) is None


def test_an_update_that_a_script_makes_itself_is_told_nothing_of_squares():
    unknown = check("NS102", Evidence(facts=replace(half_head(), optimizer=None)))
    by_hand = replace(half_head(), optimizer=None, veto=BY_HAND)
    found = check("NS102", Evidence(facts=by_hand))
    assert "squared" in unknown.cause
    assert found.cause == "an update below 1/4096 of a float16 weight is rounded away"
    assert "squared" not in check("NS402", evidence(UPDATE, by_hand)).cause


EMPTY = event(op="aten.mean.default", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(0, 4)),))  # fmt: skip
ROWS_COUNTED = event(op="aten.pow.Tensor_Scalar", dtype="float32", wider="nonfinite", scalars=(-0.5,), inputs=(stats("float32", shape=(14,), zeros=1),), descent=(("count", "data"),))  # fmt: skip
CLASSES = event(op="aten.nll_loss_forward.default", dtype="float32", bad={"nan": 1}, inputs=(stats("float32", shape=(4, 8)), stats("int64"), stats("float32", shape=(8,))))  # fmt: skip


@pytest.mark.parametrize(
    ("failed", "title"),
    [
        (EMPTY, "`mean` over no element"),
        (COUNTS, "division by a count of 0"),
        (ROWS_COUNTED, "division by a count of 0"),
        (CLASSES, "division by a sum of 0"),
    ],
)
def test_a_count_of_0_is_no_operation_over_no_element(failed, title):
    assert check("NS205", evidence(localization(failed))).title == title


EXP = event(op="aten.exp.default", dtype="float32", source=SourceLine(file="train.py", line=8, function="f"))  # fmt: skip
BY_ZERO = event(op="aten.div.Tensor", dtype="float32", wider="nonfinite", inputs=(stats("float32"), stats("float32", zeros=1)), descent=(("parameter",), ("parameter",)))  # fmt: skip


@pytest.mark.parametrize(
    ("exact", "rounded", "lines", "cause"),
    [
        ("finite", EXP, 2, "by a value that was rounded to 0"),
        ("finite", None, 0, "by a value that is 0"),
        ("nonfinite", None, 0, "by a value that is 0, for these inputs in any format"),
        ("unknown", None, 0, "by a value that is 0, for these inputs in any format"),
    ],
)
def test_a_divisor_that_float64_holds_was_rounded_to_0(exact, rounded, lines, cause):
    place = replace(localization(BY_ZERO), in_float64=exact, vanished=rounded)
    found = check("NS204", evidence(place))
    assert found.cause.endswith(cause)
    assert len(found.lines) == lines


@pytest.mark.parametrize("exact", ["finite", "nonfinite", "unknown"])
def test_no_wider_format_is_said_of_what_float64_has_no_value_for(exact):
    log = event(op="aten.log.default", dtype="float32", wider="nonfinite", bad={"neginf": 1}, inputs=(stats("float32", zeros=1),), descent=(("parameter",),))  # fmt: skip
    found = check("NS207", evidence(replace(localization(log), in_float64=exact)))
    said = "no wider format has a value for these numbers either"
    assert (said in found.lines) == (exact == "nonfinite")


def one_update_at(rate, *, at=20, before=2.0, since=9.0, num=60, usual=1e-3, shared=1):
    """A run with ``shared`` updates at a rate of their own."""
    rates = [rate if at <= n < at + shared else usual for n in range(num)]
    losses = [since if n > at else before for n in range(num)]
    return Evidence(
        facts=setup().facts,
        series=(series("lr", rates), series("loss_raw", losses), series("grad_norm", losses)),
    )


def test_a_loss_that_stays_up_since_one_update():
    found = check("NS404", one_update_at(5.0))
    assert (found.code, found.confidence, found.seen.step) == ("NS404", "likely", 20)
    assert "at a learning rate of 5, those beside it at 0.001 or less" in found.cause


@pytest.mark.parametrize(
    "other",
    [
        {"rate": 5e-3},  # no rate of its own
        {"rate": 5.0, "shared": 3},  # of a phase
        {"rate": 5.0, "at": 3},  # of a beginning
        {"rate": 5.0, "at": 57},  # what becomes of it is yet to be seen
        {"rate": 5.0, "since": 3.0},  # not far up
        {"rate": 5.0, "before": -2.0},  # a loss without a floor
        {"rate": 1e-3, "since": 900.0},  # another task
    ],
)
def test_other_rates_and_losses_are_no_ruin(other):
    assert check("NS404", one_update_at(**other)) is None


def test_a_loss_that_comes_back_is_no_ruin():
    ruined = one_update_at(5.0)
    rates, losses, norms = ruined.series
    back = replace(losses, values=(*losses.values[:-4], 1.9, 1.8, 1.8, 1.8))
    assert check("NS404", replace(ruined, series=(rates, back, norms))) is None
