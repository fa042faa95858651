"""Localization on real architectures: planted faults are named, healthy models are silent."""

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

import planted
import tiny
from nanstop.records import Position
from planted import NAN, located, op_of

pytestmark = pytest.mark.filterwarnings(
    # transformers and peft call each other's old names
    "ignore:.*deprecated:FutureWarning",
    # torch.compile looks at it
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
DECODER = COMMON | {"num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, DECODER),
    "gemma3": (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig,
        DECODER | {"head_dim": 16, "sliding_window": 4},
    ),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, DECODER),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, DECODER | {"head_dim": 16}),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, DECODER | {"sliding_window": 4}),
    "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig, DECODER | {"num_local_experts": 4}),
    "qwen3moe": (
        tf.Qwen3MoeForCausalLM,
        tf.Qwen3MoeConfig,
        DECODER
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt2": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config,
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        | {"bos_token_id": 1, "eos_token_id": 1},
    ),
    "opt": (
        tf.OPTForCausalLM,
        tf.OPTConfig,
        COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, COMMON),
    "t5": (
        tf.T5ForConditionalGeneration,
        tf.T5Config,
        {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        | {"d_kv": 16, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "bert": (tf.BertForMaskedLM, tf.BertConfig, COMMON),
}


def build(name, kernel="eager", **overrides):
    torch.manual_seed(0)
    architecture, config, settings = ARCHITECTURES[name]
    config = config(**(settings | overrides))
    return architecture._from_config(config, attn_implementation=kernel).train()


def padded_batch(side):
    batch = planted.text_batch()
    mask = torch.ones(2, 16, dtype=torch.long)
    if side == "left":
        mask[0, :6] = 0
    else:
        mask[1, 10:] = 0
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }


def under_autocast(dtype):
    def loss(model, batch):
        with torch.autocast("cpu", dtype=dtype):
            return planted.called(model, batch)

    return loss


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_healthy_models_are_silent(name, kernel):
    """Left padding, then right: float16 weights with the first, bfloat16 with the second,
    autocast with both.
    """
    if kernel == "sdpa" and not ARCHITECTURES[name][0]._supports_sdpa:
        pytest.skip(f"{name} has no SDPA in this version of transformers")
    for side, dtype in (("left", torch.float16), ("right", torch.bfloat16)):
        batch = padded_batch(side)
        model = build(name, kernel)
        assert located(model, under_autocast(dtype), batch) is None
        assert located(model.to(dtype), batch=batch) is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_healthy_models_are_silent_in_float32(name):
    assert located(build(name), batch=padded_batch("left")) is None


def overflowing_norm(dtype=torch.float16):
    model = build("gemma3", num_hidden_layers=3)
    model.model.layers[1].post_feedforward_layernorm.weight.data.fill_(6e4)
    return model.to(dtype)


def test_gemma3_half_overflows_in_the_norm():
    found = located(overflowing_norm())
    assert found.key.module == "model.layers.1.post_feedforward_layernorm"
    assert (found.key.phase, op_of(found), found.first_bad.wider) == (
        "forward",
        "_to_copy",
        "finite",
    )
    assert found.first_bad.source.text == "return output.type_as(x)"
    assert found.first_bad.inputs[0].dtype == "float32"
    assert found.first_bad.inputs[0].absmax > 65504
    assert found.key.module in [event.module for event in found.growth]


def test_gemma3_bfloat16_is_silent():
    assert located(overflowing_norm(torch.bfloat16)) is None


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_qwen2_half_attention(kernel):
    model = build("qwen2", kernel)
    attention = model.model.layers[1].self_attn
    attention.q_proj.bias.data[3::8] = 300
    attention.k_proj.bias.data[3::8] = 300
    found = located(model.half())
    if kernel == "sdpa":
        assert found is None or found.key.phase == "backward"
        return
    assert (op_of(found), found.key.module) == ("bmm", "model.layers.1.self_attn")
    assert found.first_bad.wider == "finite"
    assert "torch.matmul(query, key_states" in found.first_bad.source.text
    assert "model.layers.1.self_attn.q_proj" in [event.module for event in found.growth]


def gated_overflow(model, by=1e25):
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight.data.mul_(by)
    mlp.gate_proj.weight.data.mul_(by)


def test_gated_product_is_blamed_and_not_its_consumer():
    model = build("llama")
    gated_overflow(model, 1e4)
    found = located(model.half())
    assert (op_of(found), found.key.module) == ("mul", "model.layers.1.mlp")


def test_opt_half_mask_arithmetic():
    """Scores below -16 added to finfo.min give -inf: meant;
    only the row masked throughout fails.
    """
    model = build("opt").half()
    for layer in model.model.decoder.layers:
        layer.self_attn.q_proj.bias.data.fill_(6.0)
        layer.self_attn.k_proj.bias.data.fill_(-6.0)
    lowest = torch.finfo(torch.float16).min
    mask = torch.full((16, 16), lowest, dtype=torch.float16).triu(1)
    batch = planted.text_batch() | {"attention_mask": mask.expand(2, 1, 16, 16).clone()}
    batch["position_ids"] = torch.arange(16).expand(2, 16)
    assert located(model, batch=batch) is None
    batch["attention_mask"][1, :, 4] = lowest
    found = located(model, batch=batch)
    assert (op_of(found), found.key.module) == ("_softmax", "model.decoder.layers.0.self_attn")
    assert found.first_bad.fully_masked_rows > 0
    assert found.positions == (Position(sample=1, first_token=4, last_token=4),)


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_parameter_of_an_expert(name):
    model = build(name)
    weights = dict(model.named_parameters())
    experts = (n for n in weights if "layers.1" in n and "experts" in n)
    expert = next(n for n in experts if "down" in n or "w2" in n)
    weights[expert].data.fill_(NAN)
    found = located(model)
    assert (found.origin, found.culprit) == ("from_param", expert)
    assert found.key.module.startswith(expert.partition("experts")[0].removesuffix("."))


def test_t5_relative_bias():
    model = build("t5")
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    bias.weight.data[0, 0] = NAN
    found = located(model)
    assert found.origin == "from_param"
    assert found.culprit == "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def test_gpt2_activation():
    model = build("gpt2")
    model.transformer.h[1].mlp.c_fc.bias.data.fill_(6e4)
    found = located(model.half())
    assert found.key.module == "transformer.h.1.mlp.act"
    assert (op_of(found), found.first_bad.wider) == ("pow", "finite")


def test_overflow_absorbed_in_half_normalisation():
    class HalfNorm(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    model = build("llama")
    model.model.embed_tokens.weight.data.mul_(3e4)
    model.model.layers[0].input_layernorm = HalfNorm()
    found = located(model.half())
    assert (found.origin, found.key.kind) == ("absorbed", "absorbed")
    assert found.key.module == "model.layers.0.input_layernorm"
    assert op_of(found) == "pow"


class RootAtZero(nn.Module):
    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y + (y - y).abs().sqrt()


class BadWhenRunAgain(RootAtZero):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (NAN if self.calls % 2 == 0 else 1.0)


def checkpointed(reentrant):
    model = build("llama")
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_under_checkpointing(reentrant):
    model = checkpointed(reentrant)
    model.model.layers[1].mlp.act_fn = RootAtZero(model.model.layers[1].mlp.act_fn)
    found = located(model)
    assert (found.key.phase, found.key.module) == ("backward", "model.layers.1.mlp.act_fn")
    assert found.first_bad.forward_op == "aten.sqrt.default"
    assert found.first_bad.source.text == "return y + (y - y).abs().sqrt()"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_under_checkpointing(reentrant):
    model = checkpointed(reentrant)
    model.model.layers[1].mlp.act_fn = BadWhenRunAgain(model.model.layers[1].mlp.act_fn)
    found = located(model)
    assert (found.key.phase, found.key.module) == ("recompute", "model.layers.1.mlp.act_fn")
    assert (op_of(found), found.origin) == ("mul", "born_here")


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_lora_adapter(reentrant):
    from peft import LoraConfig, get_peft_model

    base = build("llama") if reentrant is None else checkpointed(reentrant)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    ).train()
    if reentrant is not None:
        model.enable_input_require_grads()
    adapter = model.base_model.model.model.layers[1].self_attn.q_proj
    adapter.lora_A["default"].weight.data.fill_(10)
    adapter.lora_B["default"].weight.data.fill_(3e38)
    found = located(model)
    assert found.key.module.endswith("layers.1.self_attn.q_proj.lora_B.default")
    assert (found.key.phase, op_of(found), found.first_bad.wider) == ("forward", "mm", "finite")


def quantized(damage=lambda model: None):
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    model = build("llama", hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    damage(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            packed = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            packed.weight = bnb.nn.Params4bit(
                layer.weight.data.clone(), requires_grad=False, quant_type="nf4"
            )
            model.set_submodule(name, packed.to("cpu"))
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()


@pytest.mark.filterwarnings("ignore")
def test_four_bit_layers():
    assert located(quantized()) is None
    found = located(quantized(gated_overflow))
    assert found.key.module.endswith("model.layers.1.mlp")
    assert (op_of(found), found.first_bad.wider) == ("mul", "finite")
    assert any("gate_proj" in e.module or "up_proj" in e.module for e in found.growth)


def test_autocast_overflow():
    model = build("llama")
    gated_overflow(model, 1e4)
    found = located(model, under_autocast(torch.float16))
    assert (op_of(found), found.key.module) == ("mul", "model.layers.1.mlp")
    assert found.first_bad.outputs[0].dtype == "float16"


def test_scaled_gradient_overflow():
    found = located(build("llama").half(), lambda m, b: planted.called(m, b) * 2.0**24)
    assert (found.key.phase, op_of(found), found.first_bad.wider) == (
        "backward",
        "_to_copy",
        "finite",
    )
    assert found.first_bad.source.text == "logits = logits.float()"


def test_reference_model_is_not_under_the_root():
    reference = tiny.llama(1)
    reference.model.layers[1].mlp.up_proj.weight.data.fill_(NAN)

    def loss(model, batch):
        with torch.no_grad():
            target = reference(**batch).logits
        return F.mse_loss(model(**batch).logits, target)

    found = located(build("llama"), loss)
    assert found.key.module == "LlamaForCausalLM.model.layers.1.mlp.up_proj"
    assert (found.origin, found.culprit) == ("from_param", f"{found.key.module}.weight")
    assert found.of_another_model


def test_generation_that_raises():
    model = build("llama").eval()
    gated_overflow(model, 1e30)

    def loss(m, b):
        with torch.no_grad():
            m.generate(b["input_ids"], max_new_tokens=2, do_sample=True, pad_token_id=0)
        return torch.zeros((), requires_grad=True) * 1

    found = located(model, loss, phase="generate")
    assert (found.key.phase, op_of(found), found.key.module) == (
        "generate",
        "mul",
        "model.layers.1.mlp",
    )
    assert found.reaches == ("exception",)


def test_compiled_code_survives_a_recording():
    model = build("llama")
    original = model.model.layers[1].mlp
    model.model.layers[1].mlp = torch.compile(original, backend="aot_eager")
    planted.called(model, planted.text_batch()).backward()
    counters = torch._dynamo.utils.counters
    before = counters["frames"].copy(), counters["stats"].copy()
    original.up_proj.weight.data.mul_(1e30)
    original.gate_proj.weight.data.mul_(1e30)
    found = located(model)
    assert op_of(found) == "mul"
    seen = []
    handle = original.act_fn.register_forward_hook(lambda *_: seen.append(1))
    planted.called(model, planted.text_batch())
    handle.remove()
    assert (counters["frames"], counters["stats"]) == before
    assert not seen  # compiled code does not call a hook added after compilation
