"""Token rows made anew, samples left out, attention kernels switched."""

import pytest
import torch

import tiny
from nanstop.diagnose.findings.setup.ns103_untrained_token_rows import check
from nanstop.errors import NanstopError
from nanstop.numerics.token_rows import row_blocks, row_norms, token_rows
from nanstop.records import Atom, Evidence, RunFacts
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
    assert odd_rows(table.data, padding=0).nonzero().squeeze(1).tolist() == [60, 61, 62, 63]
    assert not odd_rows(torch.randn(100, 8)).any()
    assert odd_rows(torch.zeros(3, 8)).all()


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


def found_and_changed(table, before_cure=lambda: None):
    """Return the rows that NS103 names in a table, and those that its first remedy changes."""
    view = View(torch.nn.Embedding.from_pretrained(table, freeze=False))
    weight = view.root.weight
    rows = token_rows("weight", row_norms(table), lambda: row_blocks(table))
    diagnosis = check(Evidence(facts=RunFacts(token_rows=(rows,))))
    before_cure()
    before = weight.detach().clone()
    with applied(view, diagnosis.remedies[0]):
        changed = (weight != before).any(1).nonzero().flatten().tolist()
    assert torch.equal(weight, before)
    return [*rows.zero_rows, *rows.outlier_rows], changed


def leaning(num):
    generator = torch.Generator().manual_seed(0)
    return 0.02 * torch.randn(num, 64, generator=generator) + 0.125


@pytest.mark.parametrize("size", [10.0, 0.1, 0.0])
def test_what_is_found_is_what_is_made_anew(size):
    table = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    table[[5, 40, 41, 42]] *= size
    assert found_and_changed(table) == ([5, 40, 41, 42], [5, 40, 41, 42])


def test_rows_added_as_noise_and_rows_beyond_a_screenful_are_made_anew():
    noise = 0.5 * torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    added = list(range(500, 700))
    assert found_and_changed(torch.cat([leaning(500), noise])) == (added, added)


def test_named_rows_that_were_trained_meanwhile_and_others_that_broke_stay():
    table = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    table[[5, 6]] = 0.0

    def train():
        table[5], table[7] = table[8], 0.0

    assert found_and_changed(table, train) == ([5, 6], [6])


def test_rows_are_said_by_the_atom():
    view, table = extended()
    before = table.detach().clone()
    with applied(view, [init("mean 60,62-63")]):
        assert torch.equal(table[:62], torch.cat([table[:60], table[60:61], before[61:62]]))
        assert torch.allclose(table[[60, 62, 63]], before[:60].mean(0).expand(3, -1), atol=1e-6)
    assert torch.equal(table.view(torch.uint8), before.view(torch.uint8))
    too_far = pytest.raises(NanstopError, match="rows 5 to 64 of a table of 64")
    with too_far, applied(view, [init("mean 5-64")]):
        pass


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


def test_samples_that_are_dicts_in_a_list_are_left_out_whole():
    """As the labels of a detector: three boxes in each of four images."""
    labels = [
        {"boxes": torch.full((3, 4), float(k)), "class_labels": torch.ones(3)} for k in range(4)
    ]
    kept = rebatch({"pixel_values": torch.zeros(4, 2), "labels": labels}, drop("0:1"))
    assert len(kept["pixel_values"]) == 3
    assert [float(one["boxes"][0, 0]) for one in kept["labels"]] == [0.0, 2.0, 3.0]
    assert all(len(one["boxes"]) == 3 for one in kept["labels"])


def test_what_a_script_holds_of_dicts_in_a_list_is_not_left_out_by_rows():
    batch = {"images": torch.zeros(4, 2), "targets.0.boxes": torch.zeros(3, 4)}
    batch |= {f"targets.{k}.boxes": torch.zeros(3, 4) for k in range(4)}
    with pytest.raises(NanstopError, match="cannot be left out"):
        rebatch(batch, drop("0:1"))
