"""Tiny models with planted ranges, for plans."""

from __future__ import annotations

import torch

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
    """Norms that put 1e5 into the residual stream, and norms behind them that live with it, as in ``demo.dpo``."""
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


def qwen2(**settings):
    return tiny.qwen2(**({"hidden_size": HIDDEN, "intermediate_size": 128} | settings))


def state(model):
    """All that a plan must leave as it was: values, formats, storages, what stands on the instances."""
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
