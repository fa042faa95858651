"""A model that was cured stays cured where it is loaded: with its plan, and exported without
nanstop.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cured_models
import nanstop
from cured_models import IDS, ISLAND, MAKERS, logits_of
from nanstop import cli

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")  # of peft and trl

KINDS = [pytest.param(k, marks=pytest.mark.slow) if k == "sft-lora" else k for k in MAKERS]

ELSEWHERE = """
import json, sys
sys.modules["nanstop"] = None  # not importable
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
ids = torch.arange(3, 19)[None]
found = {}
for place in sys.argv[1:]:
    folder, dtype = place.split("=")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        logits = model(ids).logits
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    finite = all(bool(one.isfinite().all()) for one in made.logits)
    found[dtype] = {"finite": finite, "logits": logits.float().flatten().tolist()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cured(request, tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = MAKERS[kind](tmp_path_factory.mktemp(kind))
        return made[kind]

    return of


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)


def elsewhere(folder, *formats):
    """What transformers alone makes of folders, in a process that has no nanstop."""
    places = [f"{folder / dtype}={dtype}" for dtype in formats]
    command = [sys.executable, "-c", ELSEWHERE, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_computes_under_its_plan_what_the_watched_one_did(cured, kind):
    one = cured(kind)
    assert one.logits.isfinite().all()
    model = loaded(one.folder)
    formats = {name: p.dtype for name, p in model.named_parameters()}
    assert not logits_of(model).isfinite().all()
    with nanstop.load_plan(one.folder).apply(model):
        assert torch.equal(logits_of(model), one.logits)
        assert {name: p.dtype for name, p in model.named_parameters()} == formats
    assert not logits_of(model).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_is_finite_where_there_is_no_nanstop(cured, kind, tmp_path, capsys):
    one = cured(kind)
    far = {"bfloat16": 0.03, "float32": 0.002}
    for dtype in far:
        words = ["export", one.folder, "--out", tmp_path / dtype, "--dtype", dtype]
        assert cli.main([str(word) for word in words]) == cli.OK
    exact = one.logits.float().flatten()
    for dtype, found in elsewhere(tmp_path, *far).items():
        assert found["finite"]
        got = torch.tensor(found["logits"])
        assert float((got - exact).norm() / exact.norm()) < far[dtype]
    said = capsys.readouterr().out
    assert f"first at {'base_model.model.' if kind == 'sft-lora' else ''}{ISLAND}" in said
    assert "float16 with its plan" in said


def test_the_weights_that_are_saved_beside_a_plan_are_those_of_a_plain_save(cured, tmp_path):
    one = cured("loop")
    type(one.model).save_pretrained(one.model, tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (one.folder / name).read_bytes()
    assert not (tmp_path / "nanstop-plan.yaml").exists()


@pytest.mark.slow
def test_the_card_that_peft_writes_says_how_the_adapter_is_loaded(cured):
    card = (cured("sft-lora").folder / "README.md").read_text()
    assert "library_name: peft" in card
    assert card.count("nanstop.load_plan(FOLDER).apply(model)") == 1
    assert f"{ISLAND}` in float32" in card


def test_each_save_and_the_end_say_what_the_model_needs(tmp_path, capsys):
    cured_models.by_loop(tmp_path)
    said = capsys.readouterr().err
    assert said.count("what is saved of the model needs that too") == 1
    assert f"saved in {tmp_path / 'saved'}: to compute finite, whoever loads it has to" in said
    assert f"nanstop export {tmp_path / 'saved'} --out NEW" in said


@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_a_healthy_model_is_saved_as_ever(tmp_path, kind, capsys):
    one = MAKERS[kind](tmp_path, cured_models.gemma2(gain=4e2))
    assert one.watch.incidents == ()
    assert not (one.folder / "nanstop-plan.yaml").exists()
    assert "save_pretrained" not in vars(one.model)
    assert "needs that too" not in capsys.readouterr().err
    assert logits_of(loaded(one.folder)).equal(one.logits)


def test_a_copy_of_a_cured_model_is_of_its_own_class_alone(cured, tmp_path):
    import copy

    copied = copy.deepcopy(cured("loop").model)
    assert "save_pretrained" not in vars(copied)
    torch.save(cured("loop").model, tmp_path / "whole.pt")
    assert b"nanstop" not in (tmp_path / "whole.pt").read_bytes()


def test_saves_are_followed_until_the_next_training_of_the_model(cured, tmp_path):
    one = cured("loop")
    model = one.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanstop.watch(model, optimizer, out=tmp_path / "n", policy="observe") as watch:
        watch.step(lambda b: model(input_ids=b, labels=b).loss.float() * 0.0, IDS)
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "nanstop-plan.yaml").exists()


def test_a_card_that_is_written_for_a_push_says_it_too(tmp_path, monkeypatch):
    """``push_to_hub`` saves into a folder, writes the card there, and uploads it, in this order."""
    from transformers.utils.hub import PushToHubMixin

    def upload(_model, working_dir, *_args, **_options):
        shutil.copytree(working_dir, tmp_path / "hub")

    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", upload)
    model, folder = cured_models.by_loop(tmp_path).model, tmp_path / "work"
    model.save_pretrained(folder)
    assert not (folder / "README.md").exists()
    (folder / "README.md").write_text("# Pushed")
    model._upload_modified_files(folder, "me/it", files_timestamps={})
    card = (tmp_path / "hub" / "README.md").read_text()
    assert card.startswith("# Pushed")
    assert card.count("nanstop.load_plan(FOLDER).apply(model)") == 1


SCRIPT = """
import sys
from pathlib import Path
import torch
import cured_models, tiny
from transformers import Trainer, TrainingArguments

torch.set_num_threads(1)
if __name__ == "__main__":
    args = TrainingArguments(**tiny.training_args("out", optim="sgd", max_steps=2))
    model = cured_models.gemma2()
    trainer = Trainer(model=model, args=args, train_dataset=tiny.TokenRows())
    trainer.train()
    trainer.save_model("by-trainer")
    Path("by-hand").mkdir()
    Path("by-hand", "README.md").write_text("# Mine")
    model.save_pretrained("by-hand")
"""


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_nanstop_saves_with_a_plan(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    path = str(Path(cured_models.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-m", "nanstop", "run", "--out", "found", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    plans = [nanstop.load_plan(tmp_path / name).record for name in ("by-trainer", "by-hand")]
    assert plans[0] == plans[1] == nanstop.load_plan(tmp_path / "found").record
    assert (tmp_path / "by-hand" / "README.md").read_text().startswith("# Mine\n\n<!-- nanstop")
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("to compute finite, whoever loads it has to") == 1
