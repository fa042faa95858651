"""Token rows made anew, samples left out, attention kernels switched."""

import pytest
import torch

import tiny
from nanstop.errors import NanstopError
from nanstop.records import Atom
from nanstop.remedies.apply import applied
from nanstop.remedies.data import dropped_micros, odd_rows, rebatch
from remedies.views import IDS, View, plain, qwen2


def extended(dtype=torch.float32):
    """A tied model with four untrained rows at the end, one of them wild, and a padding row."""
    view = plain(tiny.llama(tie_word_embeddings=True).to(dtype))
    table = view.root.lm_head.weight
    table.data[60:62] = 0.0
    table.data[62] = 300.0
    table.data[63] = float("nan")
    return view, table


def init(value, target="model.embed_tokens.weight"):
    return Atom(remedy="init_rows", target=target, value=value)


def test_odd_rows():
    _, table = extended()
    assert odd_rows(table.data, padding=(0,)).tolist() == [60, 61, 62, 63]
    assert odd_rows(torch.randn(100, 8)).tolist() == []
    assert odd_rows(torch.zeros(3, 8)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mean_rows(dtype):
    view, table = extended(dtype)
    before = table.detach().clone()
    with applied(view, [init("mean")]):
        others = torch.cat([table[:60]]).float()
        assert torch.allclose(table[60:].float(), others.mean(0).expand(4, -1), atol=1e-3)
        assert torch.equal(table[:60], before[:60])
        assert view.root(input_ids=IDS, labels=IDS).loss.isfinite()
    assert torch.equal(table.view(torch.uint8), before.view(torch.uint8))


def test_normal_rows_differ_and_are_small():
    view, table = extended()
    state = torch.get_rng_state()
    with applied(view, [init("normal")]):
        first = table[60:].detach().clone()
        mean = table[:60].mean(0)
        deviation = (first - mean).norm(dim=1) / (table[1:60] - mean).norm(dim=1).mean()
    assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(row.tolist()) for row in first}) == 4
    assert 0.05 < deviation.min() <= deviation.max() < 0.2


def test_rows_that_training_moved_stay():
    view, table = extended()
    with applied(view, [init("mean")]):
        table.data[60:] += 1.0
        trained = table.detach().clone()
    assert torch.equal(table, trained)


def test_no_row_to_start_from():
    view = View(torch.nn.Embedding(4, 8))
    view.root.weight.data.zero_()
    with (
        pytest.raises(NanstopError, match="no trained row"),
        applied(view, [init("mean", "weight")]),
    ):
        pass
    assert not view.root.weight.any()


def drop(*targets):
    return [Atom(remedy="drop_sample", target=target) for target in targets]


def test_dropped_sample():
    batch = {
        "input_ids": torch.arange(12).view(3, 4),
        "labels": torch.arange(12).view(3, 4),
        "num_items_in_batch": torch.tensor(12),
        "names": ["a", "b", "c"],
        "position": torch.arange(4),
    }
    kept = rebatch(batch, drop("0:1"))
    assert kept["input_ids"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert kept["names"] == ["a", "c"]
    assert kept["num_items_in_batch"] is batch["num_items_in_batch"]
    assert kept["position"] is batch["position"]
    assert len(batch["names"]) == 3


def test_nested_and_positional_entries():
    inner = {"x": torch.zeros(2, 3), "y": [torch.ones(2), torch.ones(2)]}
    kept = rebatch({"arg0": inner, "arg1": torch.arange(2)}, drop("1:0"))
    assert kept["arg0"]["x"].shape == (1, 3)
    assert [len(part) for part in kept["arg0"]["y"]] == [1, 1]
    assert kept["arg1"].tolist() == [1]


def test_only_samples_of_this_micro_batch():
    batch = {"input_ids": torch.arange(6).view(3, 2)}
    assert rebatch(batch, drop("1:0"), micro=0) is batch
    assert len(rebatch(batch, drop("0:0", "1:1"), micro=1)["input_ids"]) == 2
    assert rebatch(batch, [Atom(remedy="bf16")]) is batch


@pytest.mark.parametrize("targets", [("0:0", "0:1"), ("0:2",)])
def test_impossible_drops(targets):
    with pytest.raises(NanstopError, match="cannot leave out samples"):
        rebatch({"input_ids": torch.zeros(2, 2)}, drop(*targets))
    with pytest.raises(NanstopError, match="does not name a place"):
        rebatch({"input_ids": torch.zeros(2, 2)}, drop("0:x"))


def test_dropped_micros():
    atoms = [Atom(remedy="drop_micro", target="2"), Atom(remedy="bf16")]
    assert dropped_micros(atoms) == {2}


def test_attention_kernel_is_switched_and_back():
    view = plain(qwen2())
    assert view.attention() == "sdpa"
    with applied(view, [Atom(remedy="attention", value="eager")]):
        assert {
            layer.self_attn.config._attn_implementation for layer in view.root.model.layers
        } == {"eager"}
    assert view.attention() == "sdpa"
