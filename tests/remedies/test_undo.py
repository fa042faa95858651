"""Whatever is applied, and however it is left:
parameters, storages, gradients, optimizer and RNG are as before.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from nanstop.errors import NanstopError
from nanstop.numerics.modules import quantized_layers
from nanstop.records import Atom
from nanstop.records.remedies import REMEDIES
from nanstop.remedies.apply import TABLE, applied
from nanstop.remedies.precision import reference
from remedies.views import IDS, SETTINGS, View, packed_view, run, state_of
from versions import needs


def half_of(view):
    """The half format to autocast to; torch refuses to mix the two on CPU."""
    dtype = view.root.get_submodule(view.embedding()).weight.dtype
    return torch.bfloat16 if dtype == torch.float32 else dtype


def atoms_for(view):
    """At least one atom of every remedy that can act on the view."""
    island = [
        Atom(remedy="island", target=view.named(ending), value=value)
        for ending in (
            "layers.1.mlp",
            "layers.0",
            "layers.1.post_attention_layernorm",
            "lm_head",
            "embed_tokens",
        )
        for value in ("float32", "float32->input")
    ]
    table = view.named("embed_tokens") + ".weight"
    found = [
        *island,
        Atom(remedy="outer_autocast", value=str(half_of(view)).removeprefix("torch.")),
        Atom(remedy="bf16"),
        Atom(remedy="attention", value="eager"),
        Atom(remedy="fp32_trainables"),
        Atom(remedy="fp32_logits"),
        Atom(remedy="init_rows", target=table, value="mean"),
        Atom(remedy="init_rows", target=table, value="normal"),
        Atom(remedy="drop_sample", target="0:1"),
        Atom(remedy="drop_micro", target="0"),
    ]
    if view.optimizer is not None:
        found += [
            Atom(remedy="optimizer_eps", value="1e-05"),
            Atom(remedy="fp32_optimizer_state"),
            Atom(remedy="optimizer_swap", value="adamw"),
            Atom(remedy="clip", value="1.0"),
            Atom(remedy="lr", value="0.1"),
            Atom(remedy="loss_scale", value="0.5"),
        ]
    return found


BIAS = needs(
    "bitsandbytes", "0.50", "earlier layers cast their own bias to the format of each input"
)
UNDONE = [pytest.param(s, marks=[BIAS] if s == "4-bit with bias" else []) for s in SETTINGS]


def test_same_names_as_the_cures_in_the_same_order():
    assert list(TABLE) == list(REMEDIES)
    assert all(remedy.name == name for name, remedy in TABLE.items())


@pytest.mark.parametrize("setting", UNDONE)
def test_each_remedy_is_undone_bitwise(setting):
    view = SETTINGS[setting]()
    loss, gradients = run(view)
    before = state_of(view)
    half = half_of(view)
    for atom in atoms_for(view):
        run(view)
        with applied(view, (atom,)):
            # an island's float32 output cannot meet half weights without an autocast around it
            with torch.autocast("cpu", dtype=half, enabled=atom.value == "float32"):
                result = view.root(input_ids=IDS, labels=IDS).loss
            assert result.isfinite()
        torch.manual_seed(3)
        again, regained = run(view)
        assert torch.equal(loss, again), atom
        assert all(torch.equal(gradients[name], regained[name]) for name in gradients), atom
        assert state_of(view) == before, atom


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_reference_is_undone_bitwise(setting):
    view = SETTINGS[setting]()
    run(view)
    before = state_of(view)
    with reference(view):
        loss = view.root(input_ids=IDS, labels=IDS).loss
        assert loss.dtype == torch.float32
    torch.manual_seed(3)
    run(view)
    assert state_of(view) == before


def trained(model):
    """A view with an optimizer that has taken one step, and a scaler."""
    view = View(model.train())
    view.optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4
    )
    view.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run(view)
    view.optimizer.step()
    run(view)
    return view


HALF_VIEW = trained(tiny.llama(tie_word_embeddings=True).half())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.booleans())
def test_any_set_however_left(data, fails):
    view = HALF_VIEW
    atoms = data.draw(
        st.lists(
            st.sampled_from(atoms_for(view)), max_size=5, unique_by=lambda a: (a.remedy, a.target)
        )
    )
    before = state_of(view)
    if fails:
        with pytest.raises(ZeroDivisionError, match="inside"), applied(view, atoms):
            raise ZeroDivisionError("inside")
    else:
        with torch.autocast("cpu", dtype=torch.float16), applied(view, atoms):
            view.root(input_ids=IDS, labels=IDS)
    assert state_of(view) == before


@pytest.mark.parametrize(
    ("atom", "message"),
    [
        (Atom(remedy="prayer"), "unknown remedy `prayer`"),
        (
            Atom(remedy="island", target="model.nowhere", value="float32"),
            "no module `model.nowhere`",
        ),
        (Atom(remedy="island", target="model", value="float8"), "must be float32"),
        (Atom(remedy="outer_autocast", value="float32"), "must be float16 or bfloat16"),
        (Atom(remedy="attention", value="telepathy"), "no such attention kernel"),
        (Atom(remedy="init_rows", target="model.nothing", value="mean"), "no parameter"),
        (Atom(remedy="init_rows", target="model.norm.weight", value="mean"), "not a table"),
        (Atom(remedy="init_rows", target="lm_head.weight", value="zeros"), "mean or normal"),
        (Atom(remedy="clip", value="-1"), "positive number"),
        (Atom(remedy="unscale", value="0"), "positive number"),
        (Atom(remedy="lr", value="half"), "positive number"),
        (Atom(remedy="optimizer_swap", value="sgd"), "must be adamw"),
        (Atom(remedy="drop_sample", target="0"), "does not name a place"),
        (Atom(remedy="drop_micro", target="last"), "does not name a place"),
    ],
)
def test_a_wrong_atom_leaves_nothing_applied(atom, message):
    before = state_of(HALF_VIEW)
    good = Atom(remedy="bf16"), Atom(remedy="island", target="lm_head", value="float32")
    with pytest.raises(NanstopError, match=message), applied(HALF_VIEW, (*good, atom)):
        pass
    assert state_of(HALF_VIEW) == before


@pytest.mark.parametrize(
    "remedy",
    [
        "clip",
        "lr",
        "unscale",
        "weight_decay",
        "optimizer_eps",
        "fp32_optimizer_state",
        "loss_scale",
    ],
)
def test_what_is_missing_is_said(remedy):
    view = View(HALF_VIEW.root)
    with (
        pytest.raises(NanstopError, match="this run has no"),
        applied(view, [Atom(remedy=remedy, value="0.5")]),
    ):
        pass


def test_contradicting_atoms():
    pair = [Atom(remedy="island", target="lm_head", value=v) for v in ("float32", "float32->input")]
    with pytest.raises(NanstopError, match="contradicts"), applied(HALF_VIEW, pair):
        pass


def test_packed_weights_are_never_cast():
    view = packed_view()
    packed, *_ = quantized_layers(view.root)
    layer = view.root.get_submodule(packed)
    before = layer.weight.data_ptr(), layer.weight.dtype
    with applied(view, [Atom(remedy="island", target=packed, value="float32")]):
        output = layer(torch.randn(2, 32, dtype=torch.bfloat16))
        assert output.dtype == torch.float32
        assert (layer.weight.data_ptr(), layer.weight.dtype) == before
    assert layer(torch.randn(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
