"""Plans through the public API:
exact regions, honest refusals, every way to train, nothing left behind.
"""

import pytest
import torch

import nanstop
import plan_models as models
from nanstop.demo import tiny
from nanstop.demo.dpo import PLANTED, massive_gemma3
from nanstop.replay.held import kept_awake

THREE = (
    "model.layers.1.post_feedforward_layernorm",
    "model.layers.2.post_attention_layernorm",
    "model.layers.4.post_feedforward_layernorm",
)
PRODUCT = "model.layers.1.mlp"


def made(model, **options):
    """A plan, after checking that making it left no trace."""
    options.setdefault("batches", models.batches())
    before = models.state(model)
    plan = nanstop.plan(model, **options)
    assert models.same(before, models.state(model))
    return plan


def agrees(plan):
    found = plan.record.agreement
    return (
        plan.found
        and max(found.loss_gap, found.update_loss_gap) <= 1e-3
        and found.grad_cosine >= 0.999
        and found.headroom_bits >= 2
        and found.update_share > 0.9
    )


def regions(plan):
    return tuple(region.modules for region in plan.record.regions)


def test_one_planted_norm():
    plan = made(massive_gemma3())
    assert regions(plan) == ((PLANTED,),)
    assert "beyond the end of float16" in plan.record.regions[0].reason
    assert agrees(plan)
    assert plan.record.cost.casts < 0, "the norm casts its own result back no more"
    assert (plan.record.logits, plan.record.loss) == ("float16", "float32")
    assert plan.record.scaler.init_scale > 1


@pytest.mark.slow
def test_three_planted_regions():
    plan = made(models.massive(THREE))
    assert regions(plan) == tuple((name,) for name in THREE)
    assert agrees(plan)


def test_no_float16_boundary_can_work():
    plan = made(models.everywhere())
    assert not plan.found
    assert str(plan).startswith("no fp16 plan; bf16 or fp32: less than 10% of the blocks'")
    with pytest.raises(nanstop.NanstopError, match="there is no float16 plan"):
        plan.apply(models.everywhere())


def test_an_overflow_of_a_container_is_cured_where_it_comes_from():
    """Gemma scales its embedding in the model's own forward:
    not the model but the table becomes float32.
    """
    model = tiny.gemma(hidden_size=64, intermediate_size=128).half()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3e5)
    plan = made(model)
    assert regions(plan)[0] == ("model.embed_tokens",)
    assert agrees(plan)


def test_a_search_that_runs_out_of_time_says_so():
    plan = made(models.massive(THREE), seconds=1e-9)
    assert not plan.found
    assert plan.record.reason.endswith("and the time was up")


def test_a_healthy_model_needs_nothing():
    plan = made(models.qwen2())
    assert regions(plan) == ()
    assert (plan.record.cost.casts, plan.record.cost.bytes) == (0, 0)
    assert agrees(plan)


def test_a_region_is_contiguous():
    """The block's own product and the projection that reads it: one module around both."""
    plan = made(models.wide_product(models.qwen2()))
    assert regions(plan) == ((PRODUCT,),)
    assert agrees(plan)


def small_batches(num=1):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (2, 8), generator=generator) for _ in range(num)]


def test_an_attention_kernel_is_a_smaller_change_than_a_region():
    """The plain kernel writes scores in float16; the fused one keeps them in float32."""
    model = models.offset_scores("eager")
    plan = made(model, batches=small_batches())
    assert (plan.record.attention, regions(plan)) == ("sdpa", ())
    assert "attention by the `sdpa` kernel: a value of 9e+04 is beyond the end" in str(plan)
    assert agrees(plan)
    with plan.apply(model):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "eager"


def test_statistics_that_a_kernel_returns_in_float32_are_no_values_of_the_plan():
    """The fused kernel's logsumexp is near 2e4, and never in float16."""
    plan = made(models.offset_scores("sdpa"), batches=small_batches())
    assert (plan.record.attention, regions(plan)) == ("", ())
    assert agrees(plan)


def test_an_attention_kernel_that_loses_what_scores_differ_in_is_no_plan():
    """Beside a bias of 280, float16 keeps too little of queries and keys:
    what attends has to be float32.
    """
    model = models.qwen2(hidden_size=64, attn_implementation="eager")
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.bias.view(-1, attention.head_dim)[:, -1] = 280.0
    plan = made(model)
    assert (plan.record.attention, regions(plan)) == ("", (("model.layers.1.self_attn",),))
    assert agrees(plan)


def test_a_plan_has_to_pass_on_batches_that_the_search_did_not_see():
    """The first batch is harmless, the second one needs the region."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    data[1][0] *= 1e5

    def loss(x):
        return (model(x) - 3.0).square().mean()

    plan = made(model, batches=data, loss=loss)
    assert regions(plan) == (("0",),)
    assert "1 of the 2 held out of the search" in str(plan)
    assert regions(made(model, batches=data[:1], loss=loss)) == ()


def test_a_plan_has_to_pass_on_padded_rows_where_batches_have_a_mask():
    model, (ids,) = models.OldMask(), small_batches()
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    plan = made(model, batches=[batch])
    assert regions(plan) == (("score",),)
    assert plan.record.calibration.num_padded == plan.record.calibration.num_unseen == 1
    assert "and a copy of one with padded rows" in str(plan)


def test_the_head_alone():
    model = models.qwen2(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
        model.lm_head.weight[:, 1:] = 0.0
    plan = made(model)
    assert (regions(plan), plan.record.logits) == ((), "float32")
    assert "  float32  the output head: a value of" in str(plan)


def lora(model, **settings):
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1} | settings
    return get_peft_model(model, LoraConfig(**settings))


def checkpointed(model, *, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model.train()


def four_bit(model):
    import bitsandbytes as bnb
    from torch import nn

    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear) and name != "lm_head":
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, old.bias is not None, torch.float16
            )
            new.load_state_dict(old.state_dict())
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new.requires_grad_(False).to("cpu"))
    return model


SLOW = ("compiled", "lora in half, head trained", "reentrant checkpointing")
WAYS = {
    "half weights": lambda model: model.half(),
    "lora": lora,
    "lora in half, head trained": lambda model: lora(model.half(), modules_to_save=["lm_head"]),
    "checkpointing": lambda model: checkpointed(model, reentrant=False),
    "reentrant checkpointing": lambda model: checkpointed(model, reentrant=True),
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.slow] * (w in SLOW), id=w) for w in WAYS]
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The .grad attribute")
def test_every_way_to_train(way):
    model = WAYS[way](models.wide_product(models.qwen2()))
    plan = made(model)
    (region,) = regions(plan)
    assert region[0].endswith(PRODUCT)
    assert agrees(plan)
    assert_applies(model, plan)


def assert_applies(model, plan):
    ids = models.batches()[0]
    before = models.state(model)[:2]
    with plan.apply(model):
        output = model(input_ids=ids, labels=ids)
        (output.loss * 256).backward()
        assert bool(output.loss.isfinite())
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    rest = models.state(model)[2:]
    assert models.same((*before, *rest), models.state(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_four_bit():
    model = lora(four_bit(models.wide_product(models.qwen2())))
    ids = models.batches()[0]
    model(input_ids=ids, labels=ids)  # bitsandbytes settles its layers at their first call
    plan = made(model)
    assert agrees(plan)
    assert all("layers.1.mlp" in name for name in plan.record.modules)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_plan_goes_to_a_wrapped_model():
    plan = made(models.wide_product(models.qwen2()))
    assert_applies(lora(models.wide_product(models.qwen2())), plan)


@pytest.mark.parametrize("build", [tiny.gemma, tiny.qwen2])
def test_accumulation_in_a_watched_loop(build, tmp_path):
    """Float32 and the planned run, two micro-batches an update, the plan from its file."""
    data = models.batches(num=2)
    plan = made(models.wide_product(build(hidden_size=64, intermediate_size=128)), batches=data)
    plan.save(tmp_path / "plan.yaml")

    def losses(given):
        model = models.wide_product(build(hidden_size=64, intermediate_size=128))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        found = []
        with nanstop.watch(
            model, optimizer, out=tmp_path, accumulation=2, plan=given, policy="stop"
        ) as w:
            for _ in range(4):
                for ids in data:
                    loss = w.step(lambda ids: model(input_ids=ids, labels=ids).loss, ids)
                    found.append(float(loss))
                w.update()
        assert "forward" not in vars(model)
        return found

    assert losses(tmp_path / "plan.yaml") == pytest.approx(losses(None), rel=1e-3)


def bf16_run(tmp_path, *, steps, plan=None, float32=False):
    """Losses of a run that starts from bfloat16 weights, and the float32 loss of the weights
    that it ends with.
    """
    model = tiny.qwen2().to(torch.bfloat16)
    model = model.float() if float32 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    (ids,) = models.batches(num=1)
    with nanstop.watch(model, optimizer, out=tmp_path, plan=plan, policy="observe") as w:
        losses = []
        for _ in range(steps):
            losses.append(float(w.step(lambda ids: model(input_ids=ids, labels=ids).loss, ids)))
            w.update()
        exact = tiny.qwen2()
        with kept_awake(model):  # a state_dict has what is stored: bfloat16
            weights = {name: p.detach().float() for name, p in model.named_parameters()}
        exact.load_state_dict({**exact.state_dict(), **weights})
    return losses, float(exact(input_ids=ids, labels=ids).loss.detach())


def test_updates_that_bfloat16_loses(tmp_path):
    plan = made(tiny.qwen2().to(torch.bfloat16), dtype="bf16", lr=1e-6)
    assert plan.record.trainables == "float32"
    assert "updates go" in plan.record.trainables_reason
    assert regions(plan) == ()
    start = bf16_run(tmp_path, steps=0, float32=True)[1]
    losses, end = bf16_run(tmp_path, steps=60, float32=True)
    planned, planned_end = bf16_run(tmp_path, steps=60, plan=plan)
    _, stored_end = bf16_run(tmp_path, steps=60)
    assert planned == pytest.approx(losses, rel=0.01)
    assert start - planned_end == pytest.approx(start - end, rel=0.01)
    assert abs(start - stored_end) < 0.1 * (start - end)


def test_bfloat16_that_keeps_its_updates():
    """At a learning rate whose steps bfloat16 can hold, trainables stay as they are stored."""
    model = tiny.qwen2().to(torch.bfloat16)
    plan = made(model, dtype=torch.bfloat16, lr=1e-3)
    assert plan.record.trainables == ""
    assert agrees(plan)


def test_a_loss_of_the_user_and_its_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    with torch.no_grad():
        model[0].weight.mul_(1e5)
    plan = made(model, batches=data, loss=lambda x: model(x).square().mean(), optimizer=optimizer)
    assert regions(plan) == (("0",),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp17"}, "unknown format to plan for: `fp17`"),
        ({"batches": []}, "no batch to calibrate on"),
        ({"batches": 3}, "must be an iterable of batches"),
        ({"batches": None}, "needs batches"),
        ({"batches": [torch.empty(0, 16, dtype=torch.long)]}, r"batch 0 is empty: .* \(0, 16\)"),
        ({"batches": [{}]}, "batch 0 is empty"),
        ({"batches": [torch.ones(2, 3).long(), None]}, "batch 1 is empty"),
        ({"batches": "ids"}, "must be an iterable of batches, not str"),
        ({"batches": [{"input_ids": [[3, 4]]}]}, "`input_ids` of batch 0 is a list, not a tensor"),
        ({"batches": [torch.full((2, 3), 999)]}, "id 999 is not in the vocabulary of 512"),
        (
            {
                "batches": [
                    {"input_ids": torch.ones(1, 3).long(), "labels": torch.full((1, 3), -100)}
                ]
            },
            "batch 0 has nothing to learn",
        ),
        ({"dtype": torch.float32}, "unknown format to plan for: `float32`"),
        ({"lr": -1.0}, "must be a positive number"),
        ({"updates": 0}, "must be positive"),
        ({"loss": lambda _: torch.ones(2)}, "a tensor of one number"),
    ],
)
def test_what_cannot_be_calibrated_on(options, message):
    with pytest.raises(nanstop.NanstopError, match=message):
        nanstop.plan(tiny.qwen2(), **({"batches": models.batches()} | options))


def test_models_that_no_plan_can_be_made_for():
    with pytest.raises(nanstop.NanstopError, match="takes a torch module or a trainer, not int"):
        nanstop.plan(3, models.batches())
    frozen = tiny.qwen2().requires_grad_(requires_grad=False)
    with pytest.raises(nanstop.NanstopError, match="every parameter of the model is frozen"):
        nanstop.plan(frozen, models.batches())
    broken = tiny.qwen2()
    with torch.no_grad():
        broken.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(nanstop.NanstopError, match="not finite even in float32"):
        nanstop.plan(broken, models.batches())
