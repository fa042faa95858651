"""Tiny models with planted ranges, for plans."""

from __future__ import annotations

import torch
from torch import nn

from nanstop.demo import tiny

HIDDEN = 64
GAIN = 4e4
MASSIVE = torch.arange(0, HIDDEN, 4)


def batches(num=2, tokens=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, tiny.VOCAB, (2, tokens), generator=generator) for _ in range(num)]


def gemma3(num_layers=3):
    return tiny.gemma3(
        num_hidden_layers=num_layers, hidden_size=HIDDEN, intermediate_size=128, head_dim=32
    )


def massive(names, num_layers=5):
    """Norms that put 1e5 into the residual stream, and norms behind them that live with it, as
    in ``demo.dpo``.
    """
    model = gemma3(num_layers)
    root_mean_square = GAIN * 0.5
    first = min(int(name.split(".")[2]) for name in names)
    with torch.no_grad():
        for name in names:
            model.get_submodule(name).weight[MASSIVE] = GAIN
        behind = [model.model.norm]
        for layer in list(model.model.layers)[first + 1 :]:
            behind += [layer.input_layernorm, layer.pre_feedforward_layernorm]
        for norm in behind:
            norm.weight.fill_(root_mean_square)
            norm.weight[MASSIVE] = -1.0
    return model


def everywhere():
    """Every projection reads numbers beyond float16; the norm behind each pair brings them back."""
    model = gemma3()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1e5)
            layer.pre_feedforward_layernorm.weight.fill_(1e5)
    return model


def wide_product(model, layer=1, by=3e5):
    """The gated product of one block beyond float16, its down projection as much smaller."""
    with torch.no_grad():
        block = next(m for n, m in model.named_modules() if n.endswith(f"layers.{layer}.mlp"))
        block.up_proj.weight.mul_(by)
        block.down_proj.weight.mul_(1 / by)
    return model


def offset_scores(attention, by=300.0):
    """A GPT-2 whose queries and keys share a constant:
    all scores of a layer are ``by`` squared before their division.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, loss_type="ForCausalLM")
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        both = model.transformer.h[1].attn.c_attn
        last = [15, 31, 47, 63]  # of each head, of queries and keys
        both.weight[:, last] = 0.0
        both.bias[last] = by
    return model


class OldMask(nn.Module):
    """Masks by adding float32's smallest number to scores, which float16 does not hold:
    a row all masked is NaN there.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.score = Score()
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids, labels, attention_mask):
        x = self.embed(input_ids)
        x = self.score(x, attention_mask) @ x
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).mT
        seen = torch.ones_like(scores).tril() * mask[:, None]
        return (scores + (1 - seen) * torch.finfo(torch.float32).min).softmax(-1)


def qwen2(**settings):
    return tiny.qwen2(**({"hidden_size": HIDDEN, "intermediate_size": 128} | settings))


def state(model):
    """All that a plan must leave as it was:
    values, formats, storages, what stands on the instances.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (t.detach().clone(), t.dtype, t.data_ptr()) for name, t in tensors.items()},
        {name: (m.training, sorted(vars(m))) for name, m in model.named_modules()},
        {name: p.grad for name, p in model.named_parameters()},
        torch.get_rng_state(),
    )


def same(first, second):
    values = all(
        torch.equal(a[0], second[0][name][0]) and a[1:] == second[0][name][1:]
        for name, a in first[0].items()
    )
    others = first[1] == second[1] and first[2].keys() == second[2].keys()
    grads = all(first[2][name] is second[2][name] for name in first[2])
    return values and others and grads and torch.equal(first[3], second[3])
