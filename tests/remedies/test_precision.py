"""What the remedies of number format do:
the failing step becomes finite and agrees with float32.
"""

import copy
import inspect

import pytest
import torch

import tiny
from nanstop.numerics.modules import quantized_layers
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from nanstop.remedies.lasting import lasting
from nanstop.remedies.precision import reference
from remedies.views import (
    IDS,
    SETTINGS,
    View,
    checkpointed,
    cosine,
    gemma3,
    lora,
    packed_view,
    peft_view,
    plain,
    run,
)

AUTOCAST = Atom(remedy="outer_autocast", value="float16")
NARROW = "float32->input"


def island(target, value="float32"):
    return Atom(remedy="island", target=target, value=value)


def planted(**options):
    """A half Gemma3 whose post-feedforward norm has a weight of 5e4:
    its product leaves float16 and not float32.
    """
    model = gemma3(**options)
    model.model.layers[0].post_feedforward_layernorm.weight.data.fill_(5e4)
    return model.half()


def gradients_close(one, other):
    return cosine(one, {name: gradient.float() for name, gradient in other.items()})


@pytest.mark.parametrize("kind", ["plain", "reentrant", "checkpointed", "peft", "tied"])
def test_island_cures_an_overflow(kind):
    model = planted(tie_word_embeddings=kind == "tied")
    if kind in ("reentrant", "checkpointed"):
        model = checkpointed(model, reentrant=kind == "reentrant")
    view = plain(lora(model)) if kind == "peft" else plain(model)
    loss, _ = run(view)
    assert not loss.isfinite()
    with reference(view):
        true_loss, true_gradients = run(view)
    norm = view.named("layers.0.post_feedforward_layernorm")
    with applied(view, [island(norm), AUTOCAST]):
        cured, gradients = run(view)
    assert float((cured - true_loss).abs() / true_loss) < 1e-3
    assert gradients_close(true_gradients, gradients) > 0.999
    assert not run(view)[0].isfinite()


def test_both_atoms_are_needed():
    view = plain(planted())
    norm = view.named("layers.0.post_feedforward_layernorm")
    with applied(view, [AUTOCAST]):
        assert not run(view)[0].isfinite()
    with applied(view, [island(norm)]), pytest.raises(RuntimeError, match="dtype"):
        run(view)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("ending", ["layers.1.mlp", "layers.1.self_attn", "layers.0", "down_proj"])
def test_narrow_island_agrees_with_the_run(setting, ending):
    view = SETTINGS[setting]()
    loss, gradients = run(view)
    formats = {name: gradient.dtype for name, gradient in gradients.items()}
    with applied(view, [island(view.named(ending), NARROW)]):
        inside, regained = run(view)
    assert torch.allclose(loss, inside, rtol=5e-3)
    assert cosine(gradients, regained) > 0.99
    assert {name: gradient.dtype for name, gradient in regained.items()} == formats


@pytest.mark.parametrize("setting", SETTINGS)
def test_reference_is_float32_throughout(setting):
    view = SETTINGS[setting]()
    loss, gradients = run(view)
    with reference(view):
        true_loss, true_gradients = run(view)
        assert {g.dtype for g in true_gradients.values()} == {torch.float32}
    assert true_loss.dtype == torch.float32
    assert torch.allclose(loss.float(), true_loss, rtol=2e-2)
    assert gradients_close(true_gradients, gradients) > 0.99


def test_reference_equals_a_float32_model():
    half = plain(gemma3().half())
    single = plain(copy.deepcopy(half.root).float())
    with reference(half):
        loss, gradients = run(half)
    true_loss, true_gradients = run(single)
    assert torch.equal(loss, true_loss)
    assert all(torch.equal(gradients[name], true_gradients[name]) for name in gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_island_holding_checkpointed_layers(reentrant):
    view = plain(checkpointed(planted(), reentrant=reentrant))
    with reference(view):
        true_loss, true_gradients = run(view)
    with applied(view, [island("model"), AUTOCAST]):
        cured, gradients = run(view)
    assert torch.allclose(cured, true_loss, rtol=1e-3)
    assert gradients_close(true_gradients, gradients) > 0.999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reference_turns_off_the_hosts_autocast(dtype):
    view = plain(tiny.llama())
    plain_loss, plain_gradients = run(view)
    _, cast_gradients = run(view, autocast=dtype)
    # Two losses, of one number each, may round to the same one.
    assert any(
        not torch.equal(cast_gradients[name], plain_gradients[name]) for name in plain_gradients
    )
    with reference(view):
        loss, gradients = run(view, autocast=dtype)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[name], plain_gradients[name]) for name in gradients)


def accelerated(model, dtype):
    """The model with its forward wrapped on the instance, as accelerate's mixed precision does."""
    model._original_forward = model.forward
    model.forward = torch.autocast("cpu", dtype=dtype)(model.forward)
    return plain(model)


def test_reference_reaches_inside_a_wrapped_forward():
    expected, _ = run(plain(tiny.llama()))
    view = accelerated(tiny.llama(), torch.bfloat16)
    wrapped = view.root.forward
    with reference(view):
        loss, _ = run(view)
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert view.root.forward is wrapped


def test_island_in_float32_weights_under_autocast():
    model = gemma3()
    model.model.layers[0].post_feedforward_layernorm.weight.data.fill_(5e4)
    view = accelerated(model, torch.float16)
    mlp = view.named("layers.0.mlp")
    formats = []
    handle = view.root.get_submodule(mlp).down_proj.register_forward_hook(
        lambda module, args, output: formats.append((args[0].dtype, output.dtype))
    )
    run(view)
    with applied(view, [island(mlp)]):
        run(view)
    handle.remove()
    assert formats[-1] == (torch.float32, torch.float32)
    assert formats[0][1] == torch.float16


def test_bf16_cures_an_overflow_and_reaches_the_autocast():
    view = plain(planted())
    with reference(view):
        true_loss, _ = run(view)
    with applied(view, [Atom(remedy="bf16")]):
        loss, gradients = run(view)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}
    assert torch.allclose(loss.float(), true_loss, rtol=5e-2)
    formats = []
    autocast = accelerated(tiny.llama(), torch.float16)
    handle = autocast.root.lm_head.register_forward_hook(
        lambda m, a, out: formats.append(out.dtype)
    )
    with applied(autocast, [Atom(remedy="bf16")]):
        run(autocast)
    run(autocast)
    handle.remove()
    assert formats == [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "setting", ["llama fp16", "tied fp16", "peft all half", "checkpointed fp16"]
)
def test_trainables_and_their_gradients_are_float32(setting):
    view = SETTINGS[setting]()
    loss, gradients = run(view)
    with applied(view, [Atom(remedy="fp32_trainables")]):
        inside, wide = run(view)
        assert {gradient.dtype for gradient in wide.values()} == {torch.float32}
        assert all(p.dtype == torch.float32 for p in view.root.parameters() if p.requires_grad)
    assert torch.allclose(loss, inside, rtol=5e-3)
    assert cosine(gradients, wide) > 0.999
    assert {p.dtype for p in view.root.parameters()} == {torch.float16}


@pytest.mark.parametrize("setting", ["llama fp16", "checkpointed fp16"])
def test_float32_trainables_are_left_to_an_autocast_to_another_format(setting):
    """What a layer emits under it depends on the layer, and the formats have to meet again."""
    view = SETTINGS[setting]()
    loss, gradients = run(view, autocast=torch.bfloat16)
    with applied(view, [Atom(remedy="fp32_trainables")]):
        inside, wide = run(view, autocast=torch.bfloat16)
    assert {gradient.dtype for gradient in wide.values()} == {torch.float32}
    assert torch.allclose(loss, inside, rtol=2e-2)
    assert cosine(gradients, wide) > 0.99


def test_what_float32_trainables_learn_is_kept_in_the_old_storage():
    view = plain(tiny.llama().half())
    view.optimizer = torch.optim.AdamW(view.root.parameters(), lr=1e-2)
    run(view)
    parameter = view.root.lm_head.weight
    pointer, before = parameter.data_ptr(), parameter.detach().clone()
    with applied(view, [Atom(remedy="fp32_trainables")]):
        run(view)
        view.optimizer.step()
        learned = parameter.detach().clone()
        assert view.optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    assert parameter.data_ptr() == pointer
    assert not torch.equal(parameter, before)
    assert torch.equal(parameter, learned.half())
    assert view.optimizer.state[parameter]["exp_avg"].dtype == torch.float16
    assert view.optimizer.state[parameter]["step"].dtype == torch.float32


def test_half_inputs_reach_a_float32_reference():
    view = View(torch.nn.Linear(4, 1).half())
    with reference(view):
        assert view.root(torch.ones(2, 4).half()).dtype == torch.float32
    with applied(view, [Atom(remedy="bf16")]):
        assert view.root(torch.ones(2, 4).half()).dtype == torch.bfloat16


class CastsBetween(torch.nn.Module):
    """Knows its head's format and hands over what is in it; a container holds both."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1).half()])

    def forward(self, x):
        body, head = self.parts
        return head(body(x).half())


@pytest.mark.parametrize("by_script", [True, False])
def test_a_cast_to_half_before_a_module_does_not_end_the_reference(by_script):
    net = CastsBetween()
    view = View(net.parts if by_script else net)
    with reference(view):
        assert CastsBetween.forward(net, torch.ones(2, 4)).dtype == torch.float32
    with applied(view, [Atom(remedy="bf16")]):
        assert CastsBetween.forward(net, torch.ones(2, 4)).dtype == torch.bfloat16
    assert CastsBetween.forward(net, torch.ones(2, 4)).dtype == torch.float16


def test_parameters_that_share_a_storage_share_its_copy():
    first, second = torch.nn.Linear(4, 4).half(), torch.nn.Linear(4, 4).half()
    second.weight = torch.nn.Parameter(first.weight.data)
    with applied(View(torch.nn.ModuleList([first, second])), [Atom(remedy="fp32_trainables")]):
        first.weight.data[0, 0] = 7.0
        assert second.weight[0, 0] == 7.0
    assert first.weight[0, 0] == second.weight[0, 0] == 7.0


def test_casts_that_the_host_cached_are_not_used():
    view = plain(tiny.llama())
    with torch.autocast("cpu", dtype=torch.float16):
        view.root(input_ids=IDS)
        with applied(view, [Atom(remedy="bf16")]):
            assert view.root(input_ids=IDS).logits.dtype == torch.bfloat16


def test_untouched_bits_survive_beside_changed_ones():
    """A NaN's payload would not outlive a cast to float32 and back."""
    view = View(torch.nn.Linear(4, 1, bias=False).half())
    bits = torch.tensor([[0x7C01, 0x7E55, 0x0001, 0x3C00]], dtype=torch.int16)
    view.root.weight.data = bits.view(torch.float16).clone()
    with applied(view, [Atom(remedy="fp32_trainables")]):
        view.root.weight.data[0, 3] = 2.0
    assert view.root.weight.data.view(torch.int16).tolist() == [[0x7C01, 0x7E55, 0x0001, 0x4000]]


def test_gradients_accumulate_across_the_border():
    view = plain(tiny.llama().half())
    _, once = run(view)
    with applied(view, [Atom(remedy="fp32_trainables")]):
        torch.manual_seed(3)
        view.root(input_ids=IDS, labels=IDS).loss.backward()
    for name, parameter in view.root.named_parameters():
        assert torch.allclose(parameter.grad, 2 * once[name], rtol=0.05, atol=1e-4), name


@pytest.mark.parametrize("setting", ["llama fp16", "peft fp16", "tied fp16", "4-bit"])
def test_logits_are_float32(setting):
    view = SETTINGS[setting]()
    with applied(view, [Atom(remedy="fp32_logits")]), torch.no_grad():
        assert view.root(input_ids=IDS).logits.dtype == torch.float32
    with torch.no_grad():
        assert view.root(input_ids=IDS).logits.dtype != torch.float32


def test_island_below_and_above_float32_trainables():
    view = plain(planted())
    norm = view.named("layers.0.post_feedforward_layernorm")
    atoms = [Atom(remedy="fp32_trainables"), island(norm), AUTOCAST]
    with applied(view, atoms):
        loss, _ = run(view)
    assert loss.isfinite()


def test_float32_trainables_around_an_island_that_is_in_force():
    """What was kept for the rest of a run lies inside of what is tried later."""
    view = plain(planted())
    norm = view.named("layers.0.post_feedforward_layernorm")
    with applied(view, [island(norm), AUTOCAST]):
        before, _ = run(view)
        with applied(view, [Atom(remedy="fp32_trainables")]):
            loss, _ = run(view)
    assert before.isfinite()
    assert loss.isfinite()
    torch.testing.assert_close(loss, before, rtol=1e-2, atol=1e-2)


def test_an_island_that_lasts_meets_half_weights_on_other_ways_through_the_model():
    view = plain(planted())
    atoms = [island(view.named("layers.0.post_feedforward_layernorm"))]
    with applied(view, atoms), pytest.raises(RuntimeError, match="same dtype"):
        run(view)
    with lasting(view, atoms):
        loss, gradients = run(view)
    with reference(view):
        true_loss, true_gradients = run(view)
    assert float((loss.float() - true_loss).abs()) < 1e-2
    assert gradients_close(true_gradients, gradients) > 0.999
    assert not run(view)[0].isfinite()


def test_another_error_below_an_island_that_lasts_is_the_modules_own():
    layers = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(3, 4)).half()
    with lasting(View(layers), [island("0")]), pytest.raises(RuntimeError, match="cannot be mult"):
        layers(torch.randn(2, 4).half())


def test_four_bit_island_computes_in_float32():
    view = packed_view()
    packed, *_ = quantized_layers(view.root)
    layer = view.root.get_submodule(packed)
    inputs = torch.randn(4, 32)
    with applied(view, [island(packed)]):
        wide = layer(inputs)
    layer.compute_dtype = torch.float32
    assert torch.equal(wide, layer(inputs))


def test_a_wrapped_forward_has_the_signature_of_the_one_it_stands_for():
    view = peft_view(tiny.llama().half())
    target = view.root.get_submodule(view.named("layers.1.mlp"))
    expected = inspect.signature(target.forward)
    atoms = [island(view.named("layers.1.mlp"), NARROW), Atom(remedy="fp32_trainables")]
    with applied(view, [*atoms, Atom(remedy="bf16")]):
        assert inspect.signature(target.forward) == expected


def test_buffers_changed_inside_an_island_are_kept():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4)).half().train()
    view = View(model)
    inputs = torch.randn(8, 4).half() + 3
    with applied(view, [island("0")]):
        model(inputs)
    assert torch.allclose(model[0].running_mean, 0.1 * inputs.mean(0), rtol=1e-2)
    assert model[0].running_mean.dtype == torch.float16
    assert int(model[0].num_batches_tracked) == 1
