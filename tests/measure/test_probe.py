"""The whole probe: what it finds in real models, what it leaves alone, and that a stage that
fails costs only itself.
"""

import pytest
import torch
from torch import nn

import hf_cases
import tiny
from fnstep import FnStep
from nanstop.diagnose.diagnose import examine
from nanstop.hosts.trainer.first_window import first_step
from nanstop.measure.probe import probe
from nanstop.records import Evidence

torch.set_num_threads(1)


def codes(found, facts=None):
    return {d.code for d in examine(Evidence(facts=facts, probe=found), "gauge").diagnoses}


def step_of(model, optimizer=torch.optim.AdamW, lr=1e-3, **batch):
    made = optimizer(model.parameters(), lr=lr) if optimizer else None
    return FnStep(model, lambda m, b: m(**b).loss, [batch], made)


def tokens(rows=2, length=16):
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", ["fp32", "scaler", "bf16"])
def test_healthy_runs_have_no_finding(precision, tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, precision=precision)
    facts, found = first_step(trainer, lambda step: (step.facts, probe(step)))
    assert found.problems == ()
    assert codes(found, facts) <= {"NS102"}


def pretrained_like(dtype):
    model = tiny.llama(hidden_size=64, intermediate_size=128)
    return model.to(dtype)


def test_a_small_rate_in_bfloat16_loses_98_percent_of_a_real_model_s_updates():
    ids = tokens()
    found = probe(step_of(pretrained_like(torch.bfloat16), lr=1e-6, input_ids=ids, labels=ids))
    lost = sum(row.num_lost for row in found.updates) / sum(r.num_total for r in found.updates)
    assert 0.975 < lost < 0.99
    (diagnosis,) = examine(Evidence(probe=found), "gauge").diagnoses
    assert (diagnosis.code, diagnosis.confidence) == ("NS111", "certain")
    assert diagnosis.cause.startswith("98 % of the weights")


def test_the_same_in_float32_loses_nothing():
    ids = tokens()
    found = probe(step_of(pretrained_like(torch.float32), lr=1e-6, input_ids=ids, labels=ids))
    assert sum(row.num_lost for row in found.updates) == 0
    assert codes(found) == set()


def classifier(pad):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = tiny.llama().config.to_dict() | {"num_labels": 1, "pad_token_id": pad}
    config |= {"id2label": {0: "x"}, "label2id": {"x": 0}, "problem_type": "regression"}
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**config))


@pytest.mark.parametrize(("pad_of_config", "found_rows"), [(2, 2), (0, 0)])
def test_a_classifier_that_reads_at_padding(pad_of_config, found_rows):
    ids, mask = tokens(4), torch.ones(4, 16, dtype=torch.int64)
    for row, length in ((1, 9), (3, 12)):
        ids[row, length:], mask[row, length:] = 0, 0
    labels = torch.zeros(4)
    step = step_of(classifier(pad_of_config), input_ids=ids, attention_mask=mask, labels=labels)
    found = probe(step)
    assert found.num_rows_pooled_at_padding == found_rows
    assert ("NS208" in codes(found)) == bool(found_rows)


def test_rounded_rotary_frequencies_are_found_where_they_matter():
    ids = tokens(1, 512)
    for model, coarse in (
        (tiny.llama().to(torch.bfloat16), True),
        (loaded_in_bfloat16(), False),
    ):
        found = probe(step_of(model, optimizer=None, input_ids=ids, labels=ids))
        assert ("NS208" in codes(found)) == coarse
        assert found.problems == ("the update: there is no optimizer",)


def loaded_in_bfloat16():
    """As ``from_pretrained(dtype=...)`` makes it: the weights are bfloat16, ``inv_freq`` is not."""
    model = tiny.llama()
    kept = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    model.model.rotary_emb.inv_freq = kept
    return model


def test_what_a_router_draws_is_no_distance_to_float32():
    from transformers import MixtralConfig, MixtralForCausalLM

    small = tiny.llama().config.to_dict() | {"num_local_experts": 4, "tie_word_embeddings": False}
    ids = tokens()
    distances = []
    for jitter in (0.0, 0.5):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(**small, router_jitter_noise=jitter)).bfloat16()
        found = probe(step_of(model.train(), input_ids=ids, labels=ids))
        distances.append((found.loss, found.reference_loss, found.logits))
        routers = [part for part in model.modules() if hasattr(part, "jitter_noise")]
        assert {router.jitter_noise for router in routers} == {jitter}
    assert distances[0] == distances[1]


def test_what_a_forward_draws_by_itself_is_no_distance_to_float32():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + 4.0 * torch.rand_like(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Noisy(), nn.Linear(64, 4)).bfloat16()
    batch = {"x": torch.randn(128, 64).bfloat16(), "sign": torch.randn(128, 4).sign()}
    step = FnStep(model, lambda m, b: (m(b["x"]).float() * b["sign"]).sum(), [batch])
    found = probe(step)
    assert found.loss == pytest.approx(found.reference_loss, abs=1.0)


def test_gradient_checkpointing_is_probed(tmp_path):
    trainer = hf_cases.build("trainer", tmp_path, precision="bf16", checkpointing=False)
    found = first_step(trainer, probe)
    assert found.problems == ()
    assert "recompute" not in {row.phase for row in found.ranges}


def test_where_the_answer_strays_the_operation_is_named():
    class Variance(nn.Module):
        def forward(self, x):
            mean = x.mean(-1, keepdim=True)
            variance = (x * x).mean(-1, keepdim=True) - mean * mean
            return (x - mean) * torch.rsqrt(variance.clamp(min=1e-2))

    for dtype, named in ((torch.bfloat16, True), (torch.float32, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), Variance(), nn.Linear(64, 4)).to(dtype)
        x = (20 + torch.randn(4, 64)).to(dtype)
        nn.init.eye_(model[0].weight)
        step = FnStep(model, lambda m, b: m(b["x"]).float().pow(2).mean(), [{"x": x}])
        found = examine(Evidence(probe=probe(step)), "gauge").diagnoses
        assert [(d.code, d.where) for d in found] == ([("NS208", "1")] if named else [])


def test_a_stage_that_fails_costs_only_itself():
    class Refuses(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory\nand more")

    ids = tokens()
    found = probe(step_of(tiny.llama(), optimizer=Refuses, input_ids=ids, labels=ids))
    assert found.problems == ("the update: out of memory",)
    assert found.ranges
    assert found.updates == ()


def test_a_model_that_raises_leaves_an_empty_probe():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise ValueError("no such shape")

    found = probe(FnStep(Broken(), lambda m, b: m(b["x"]), [{"x": torch.ones(1)}]))
    assert found.ranges == ()
    assert found.problems == ("the window: no such shape",)
