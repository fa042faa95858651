"""``nanstop export``: what a person may give wrong, and that nothing is lost or left half."""

import json
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

import cured_models
import tiny
from nanstop import cli
from nanstop.records import Atom
from nanstop.store.beside_weights import PLAN, write_beside

torch.set_num_threads(1)

ATOMS = (
    Atom(remedy="island", target=cured_models.ISLAND, value="float32"),
    Atom(remedy="outer_autocast", value="float16"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """As after a cured run: sharded, with a card, a plan, and what a trainer leaves beside it."""
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    cured_models.gemma2().save_pretrained(folder, max_shard_size="30KB")
    tiny.tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("# Mine\n")
    (folder / "optimizer.pt").write_bytes(b"state")
    write_beside(folder, ATOMS)
    return folder


def export(*words):
    return cli.main(["export", *map(str, words)])


def contents(folder):
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def test_the_layout_is_kept_and_only_formats_change(checkpoint, tmp_path, capsys):
    before = contents(checkpoint)
    assert export(checkpoint, "--out", tmp_path / "new", "--json") == cli.OK
    said = json.loads(capsys.readouterr().out)
    assert (said["stored"], said["dtype"], said["failed_in"]) == ("float16", "bfloat16", "float16")
    finite = {(t["dtype"], t["under_plan"]): t["finite"] for t in said["trials"]}
    assert finite == {
        ("float32", False): True,
        ("bfloat16", False): True,
        ("float16", False): False,
        ("float16", True): True,
    }
    assert contents(checkpoint) == before
    made = contents(tmp_path / "new")
    assert made.keys() == before.keys() - {PLAN, "optimizer.pt"}
    assert set(said["left_out"]) == {PLAN, "optimizer.pt"}
    shards = [name for name in made if name.endswith(".safetensors")]
    assert len(shards) > 1
    for name in shards:
        old, new = load_file(checkpoint / name), load_file(tmp_path / "new" / name)
        assert all(torch.equal(new[key], old[key].bfloat16()) for key in old)
    config = json.loads(made["config.json"])
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    card = made["README.md"].decode()
    assert card.startswith("# Mine\n")
    assert "load_plan" not in card
    assert "for bfloat16" in card


def test_a_healthy_checkpoint_is_written_as_it_is(tmp_path, capsys):
    tiny.llama().half().save_pretrained(tmp_path / "old")
    assert export(tmp_path / "old", "--out", tmp_path / "new") == cli.OK
    name = "model.safetensors"
    assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    said = capsys.readouterr().out
    assert "random ids of its vocabulary" in said
    assert "texts" not in said
    assert "in float16" in said


def test_a_format_that_is_not_finite_is_refused(checkpoint, tmp_path, capsys):
    words = ("--out", tmp_path / "new", "--dtype", "fp16")
    assert export(checkpoint, *words) == cli.FINDINGS
    assert not (tmp_path / "new").exists()
    said = capsys.readouterr().out
    assert f"first at {cured_models.ISLAND}" in said
    assert "nothing was written: it is not finite in float16" in said


def test_weights_that_are_broken_themselves_have_no_format(tmp_path, capsys):
    model = tiny.llama()
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path / "old")
    assert export(tmp_path / "old", "--out", tmp_path / "new") == cli.FINDINGS
    assert "nanstop scan" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


Usage = namedtuple("Usage", "total used free")

WRONG = {
    "no such checkpoint folder": lambda made, out: (out / "nothing", out / "new"),
    "no weights in this folder": lambda made, out: (out, out.parent / "new"),
    "is there already": lambda made, out: (made, out),
    "would lie inside the checkpoint": lambda made, out: (made, made / "new"),
    "unknown format to export in": lambda made, out: (made, out / "new", "--dtype", "int8"),
    "cannot read": lambda made, out: (made, out / "new", "--data", out / "none.txt"),
    "GB are needed": lambda made, out: (made, out / "new", "--dtype", "float32"),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_call_says_what_is_wrong_and_writes_nothing(
    checkpoint, tmp_path, capsys, said, monkeypatch
):
    if said == "GB are needed":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    before = contents(checkpoint)
    given, out, *more = WRONG[said](checkpoint, tmp_path)
    assert export(given, "--out", out, *more) == cli.USAGE
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert contents(checkpoint) == before
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_leaves_nothing(checkpoint, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert export(checkpoint, "--out", tmp_path / "file" / "new") == cli.USAGE
    assert "nothing was written" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
