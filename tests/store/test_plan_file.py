"""Plans on disk: what was saved is read, what a person may write wrong is said."""

import pytest

import nanstop
from nanstop.records import (
    Agreement,
    Atom,
    Calibration,
    PlanCost,
    PrecisionPlan,
    Region,
    ScalerSettings,
)
from nanstop.store.plan_file import load_plan, save_plan

PLAN = PrecisionPlan(
    model="Gemma3ForCausalLM",
    dtype="float16",
    regions=(Region(modules=("model.layers.1.norm",), reason="a value of 1e5: too large"),),
    trainables="float32",
    logits="float16",
    loss="float32",
    scaler=ScalerSettings(init_scale=8192.0),
    attention="sdpa",
    remedies=(Atom(remedy="clip", value="1.0"),),
    agreement=Agreement(
        loss_gap=1e-6,
        grad_cosine=0.9999,
        num_updates=3,
        update_loss_gap=float("inf"),
        update_share=1.0,
        headroom_bits=float("inf"),
    ),
    cost=PlanCost(casts=-3, bytes=-32768),
    calibration=Calibration(num_batches=2, num_tokens=128, lr=1e-5, trials=2, seconds=1.5),
)


@pytest.mark.parametrize(
    "plan", [PLAN, PrecisionPlan(), PrecisionPlan(dtype="float16", reason="nothing works")]
)
def test_round_trip(tmp_path, plan):
    save_plan(plan, tmp_path / "p.yaml")
    assert load_plan(tmp_path / "p.yaml") == plan


def test_a_person_can_read_it(tmp_path):
    save_plan(PLAN, tmp_path / "p.yaml")
    text = (tmp_path / "p.yaml").read_text()
    assert text.startswith("# plan: `Gemma3ForCausalLM` computes in float16\n")
    assert "- model.layers.1.norm" in text


def test_what_older_plans_say_of_a_loss_scale_and_nobody_used_is_left_out(tmp_path):
    said = "{init_scale: 4.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000}"
    (tmp_path / "p.yaml").write_text(f"{HEAD}scaler: {said}\n")
    assert load_plan(tmp_path / "p.yaml").scaler == ScalerSettings(init_scale=4.0)


HEAD = "schema: 1\ndtype: float16\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 2\ndtype: float16", "schema 2, and this nanstop reads schema 1"),
        ("schema: 1\ndtype: [", "not YAML"),
        ("just words", "no key `schema`"),
        (HEAD + "region: []", "unknown key in .*`region`"),
        ("schema: 1\ndtype: fp16", "unknown format of `dtype` in .*`fp16`"),
        (HEAD + "regions: [{modules: [a], dtype: float64}]", r"regions\[0\].*`float64`"),
        (HEAD + "regions: [{modules: []}]", "names no module"),
        (HEAD + "regions: [{module: a}]", "PrecisionPlan.regions"),
        (HEAD + "scaler: {init_scale: many}", "PrecisionPlan.scaler.init_scale"),
        (HEAD + "scaler: {growth_interval: 500}", "PrecisionPlan.scaler.growth_interval"),
        (HEAD + "remedies: none", "`remedies` must be a list"),
        (HEAD + "trainables: 2024-01-01", "not JSON serializable"),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path, text, message):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(nanstop.NanstopError, match=message):
        load_plan(tmp_path / "p.yaml")
    with pytest.raises(nanstop.NanstopError, match=message):
        nanstop.load_plan(tmp_path / "p.yaml")


def test_a_module_that_the_model_does_not_have(tmp_path):
    from nanstop.demo import tiny

    region = Region(modules=("model.layers.1.mpl",))
    save_plan(PrecisionPlan(dtype="float16", regions=(region,)), tmp_path / "p.yaml")
    model = tiny.qwen2()
    with pytest.raises(nanstop.NanstopError, match=r"unknown module in the plan") as caught:
        nanstop.load_plan(tmp_path / "p.yaml").apply(model)
    assert "did you mean `model.layers.1.mlp`?" in caught.value.hint
    assert "forward" not in vars(model)
