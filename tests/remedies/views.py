"""A ``ModelView`` of a Hugging Face model, just enough for the remedies;
and models to try them on.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

import tiny
from nanstop.numerics.modules import quantized_layers

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@dataclass
class View:
    root: Any
    optimizer: Any = None
    scaler: Any = None
    device_type: str = "cpu"
    beside: tuple[Any, ...] = ()
    others: tuple[Any, ...] = ()

    def _inner(self):
        peft = getattr(self.root, "get_base_model", None)
        return peft() if peft else self.root

    def attention(self):
        return self._inner().config._attn_implementation

    def attention_choices(self):
        return tuple(kernel for kernel in ("eager", "sdpa") if kernel != self.attention())

    def set_attention(self, kernel):
        self._inner().set_attn_implementation(kernel)

    def head(self):
        return next((n for n, _ in self.root.named_modules() if n.endswith("lm_head")), None)

    def embedding(self):
        return next(n for n, _ in self.root.named_modules() if n.endswith("embed_tokens"))

    def named(self, ending):
        """The first module whose name ends so."""
        return next(n for n, _ in self.root.named_modules() if n.endswith(ending))


def gemma3(seed=0, **overrides):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": 0,
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**(settings | overrides)))


def qwen2(seed=0):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    with warnings.catch_warnings():  # peft reads an attribute that transformers deprecates
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = get_peft_model(model, config, **options)
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    return wrapped


def four_bit(model, dtype=torch.bfloat16, storage=torch.uint8):
    """Replace every linear layer but the head by bitsandbytes NF4.
    Returns the names of the packed layers.
    """
    import bitsandbytes as bnb

    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    ]
    for name in names:
        old = model.get_submodule(name)
        new = bnb.nn.Linear4bit(
            old.in_features,
            old.out_features,
            bias=old.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
            quant_storage=storage,
        )
        new.weight = bnb.nn.Params4bit(
            old.weight.data.clone(), requires_grad=False, quant_type="nf4", quant_storage=storage
        )
        if old.bias is not None:
            new.bias = old.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new.to("cpu"))
    return names


def checkpointed(model, *, reentrant):
    tiny.recompute(model, reentrant=reentrant)
    model.enable_input_require_grads()
    return model


def plain(model):
    return View(model.train())


def peft_view(model, **options):
    return plain(lora(model, **options))


def packed_view(build=tiny.llama, **options):
    model = build().bfloat16()
    names = four_bit(model, **options)
    wrapped = lora(model)
    assert len(quantized_layers(wrapped)) == len(names)
    return plain(wrapped)


SETTINGS = {
    "llama fp16": lambda: plain(tiny.llama().half()),
    "llama bf16": lambda: plain(tiny.llama().bfloat16()),
    "llama fp32": lambda: plain(tiny.llama()),
    "qwen2 fp16": lambda: plain(qwen2().half()),
    "gemma3 fp16": lambda: plain(gemma3().half()),
    "tied fp16": lambda: plain(tiny.llama(tie_word_embeddings=True).half()),
    "peft fp16": lambda: peft_view(tiny.llama().half()),
    "peft all half": lambda: peft_view(tiny.llama().half(), autocast_adapter_dtype=False),
    "reentrant fp16": lambda: plain(checkpointed(tiny.llama().half(), reentrant=True)),
    "checkpointed fp16": lambda: plain(checkpointed(tiny.llama().half(), reentrant=False)),
    "4-bit": packed_view,
    "4-bit in bf16 storage": lambda: packed_view(storage=torch.bfloat16),
    "4-bit with bias": lambda: packed_view(qwen2),
}


def run(view, *, autocast=None, seed=3):
    """Forward and backward from zero gradients; returns the loss and the gradients by name."""
    torch.manual_seed(seed)
    view.root.zero_grad()
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = view.root(input_ids=IDS, labels=IDS).loss
    loss.float().backward()
    gradients = {n: p.grad.clone() for n, p in view.root.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def cosine(one, other):
    """Cosine of two sets of gradients, over the names of the first."""
    first = torch.cat([one[name].double().flatten() for name in one])
    second = torch.cat([other[name].double().flatten() for name in one])
    return float(first @ second / (first.norm() * second.norm()))


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def state_of(view):
    """Everything that a remedy may touch:
    storages, formats, bits, names, instance attributes, optimizer, RNG.
    """
    tensors = {**dict(view.root.named_parameters()), **dict(view.root.named_buffers())}
    optimizer = view.optimizer
    return {
        "tensors": {
            n: (id(t), t.data_ptr(), t.dtype, t.requires_grad, bits(t).tolist())
            for n, t in tensors.items()
        },
        "gradients": {
            n: None if p.grad is None else (p.grad.dtype, bits(p.grad).tolist())
            for n, p in view.root.named_parameters()
        },
        "keys": list(view.root.state_dict()),
        "attributes": {
            n: {
                key: value
                for key, value in vars(m).items()
                if key in ("forward", "compute_dtype", "compute_type_is_set", "training")
            }
            for n, m in view.root.named_modules()
        },
        "attention": view.attention(),
        "scale": view.scaler and view.scaler.state_dict(),
        "rng": torch.get_rng_state().tolist(),
        "optimizer": optimizer
        and {
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
            ],
            "hooks": (
                len(optimizer._optimizer_step_pre_hooks),
                len(optimizer._optimizer_step_post_hooks),
            ),
            "state": [
                {
                    k: (v.data_ptr(), v.dtype, bits(v).tolist()) if torch.is_tensor(v) else v
                    for k, v in optimizer.state.get(p, {}).items()
                }
                for g in optimizer.param_groups
                for p in g["params"]
            ],
        },
    }
