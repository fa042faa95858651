"""Two configurations: what differs, what any mixture of them is, and the command that a person
would type for it.
"""

import json
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nanstop.commands.bisect.configs import ConfigForm, Pair, read_pair
from nanstop.errors import NanstopError

TRL = "from trl import TrlParser\n"
PLAIN = "import sys; print(open(sys.argv[1]).read())\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write a script and two configs into the working folder; return the pair that they make."""
    monkeypatch.chdir(tmp_path)

    def make(bad, good, script=PLAIN, suffix="yaml"):
        (tmp_path / "train.py").write_text(script)
        for name, settings in (("bad", bad), ("good", good)):
            text = settings if isinstance(settings, str) else json.dumps(settings)
            (tmp_path / f"{name}.{suffix}").write_text(text)
        return read_pair(f"bad.{suffix}", f"good.{suffix}", "train.py")

    return make


leaves = st.one_of(
    st.booleans(), st.integers(0, 2), st.sampled_from(["1e-5", "x"]), st.lists(st.integers(0, 1))
)
configs = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        leaves,
        lambda inner: st.dictionaries(st.sampled_from("ab"), inner, min_size=1),
        max_leaves=6,
    ),
)


@given(configs, configs)
def test_all_items_make_the_bad_configuration_and_none_the_good_one(bad, good):
    pair = Pair(bad, good, ConfigForm((), ".yaml", by_option=False))
    assert pair.mixed(()) == good
    assert pair.mixed(pair.items) == bad
    different = json.dumps(bad, sort_keys=True) != json.dumps(good, sort_keys=True)
    assert bool(pair.items) is different


def test_differences_are_dotted_leaves_and_a_part_of_one_side_counts_leaf_by_leaf(files):
    pair = files(
        {"lr": 1, "same": 2, "model": {"dtype": "float16", "layers": 2}, "gone": {"a": 1, "b": 2}},
        {"lr": 3, "same": 2, "model": {"dtype": "float32", "layers": 2}, "new": None},
    )
    assert list(pair.items) == ["lr", "model.dtype", "new", "gone.a", "gone.b"]
    mixed = pair.mixed(["model.dtype", "gone.b"])
    assert mixed == {
        "lr": 3,
        "same": 2,
        "model": {"dtype": "float16", "layers": 2},
        "new": None,
        "gone": {"b": 2},
    }
    assert pair.values(["gone.a", "lr"]) == {"gone.a": ("1", "(not set)"), "lr": ("1", "3")}


@pytest.mark.parametrize(
    ("bad", "good", "items"),
    [
        ({"bf16": True, "fp16": False}, {"bf16": False, "fp16": True}, ["bf16+fp16"]),
        ({"bf16": True}, {"fp16": True}, ["fp16+bf16"]),
        ({"bf16": True, "fp16": False}, {}, ["bf16", "fp16"]),
        ({"bf16": True, "tf32": False}, {"bf16": False, "tf32": True}, ["bf16", "tf32"]),
        ({"a": {"bf16": True}}, {"b": {"fp16": True}}, ["b.fp16", "a.bf16"]),
    ],
)
def test_settings_that_exclude_each_other_change_sides_together(files, bad, good, items):
    pair = files(bad, good)
    assert sorted(pair.items) == sorted(items)
    assert sorted(pair.keys(pair.items)) == sorted(key for one in items for key in one.split("+"))


def test_places_are_each_trials_own_and_nothing_is_published(files, tmp_path):
    pair = files(
        {"lr": 1, "output_dir": "bad", "push_to_hub": True, "run_name": "x"},
        {"lr": 2, "output_dir": "good"},
    )
    assert list(pair.items) == ["lr"]
    placed = pair.placed(pair.mixed(pair.items), tmp_path / "t")
    assert placed == {"lr": 1, "output_dir": str(tmp_path / "t" / "output_dir")}


@pytest.mark.parametrize(
    ("script", "middle"),
    [(TRL, ["--config"]), (PLAIN, []), ("p.add_argument('--config')", ["--config"])],
)
def test_the_script_gets_its_config_as_by_hand(files, tmp_path, script, middle):
    pair = files("lr: 1e-5\nname: yes\n", "lr: 1e-4\nname: 'no'\n", script)
    command = pair.form.command(pair.mixed(pair.items), tmp_path)
    assert command == [sys.executable, "train.py", *middle, str(tmp_path / "config.yaml")]
    # YAML 1.1 reads 1e-5 as text, and so must the script
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"lr": "1e-5", "name": True}


def test_a_json_config_stays_json(files, tmp_path):
    pair = files({"lr": 1e-5}, {"lr": 2}, suffix="json")
    command = pair.form.command(pair.mixed(pair.items), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 1e-5}
    assert command[-1].endswith("config.json")


def test_a_script_is_a_file_before_it_is_a_command_line(tmp_path):
    """Its folder may have a space, or a letter that a shell would read."""
    script = tmp_path / "it's mine" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    for name, text in (("bad", "lr: 1"), ("good", "lr: 2")):
        (tmp_path / f"{name}.yaml").write_text(text)
    pair = read_pair(str(tmp_path / "bad.yaml"), str(tmp_path / "good.yaml"), str(script))
    command = pair.form.command(pair.mixed(pair.items), tmp_path)
    assert command[:2] == [sys.executable, str(script)]
    with pytest.raises(NanstopError, match="is no command line"):
        read_pair(str(tmp_path / "bad.yaml"), str(tmp_path / "good.yaml"), "it's gone.py")


def command_pair(tmp_path, monkeypatch, bad, good):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return read_pair(bad, good)


def test_command_lines(tmp_path, monkeypatch):
    bad = (
        "train.py --lr 1e-3 --bf16 --layers 1 2 --shift -3 --seed=4 --output_dir b model.dtype=fp16"
    )
    good = (
        "train.py --lr=1e-4 --eval --layers 1 --shift -3 --seed=5 --output_dir g model.dtype=fp32"
    )
    pair = command_pair(tmp_path, monkeypatch, bad, good)
    assert set(pair.items) == {"--lr", "--bf16", "--layers", "--seed", "--eval", "model.dtype"}
    command = pair.form.command(pair.placed(pair.mixed(["--bf16", "--seed"]), tmp_path), tmp_path)
    assert command[:2] == [sys.executable, "train.py"]
    assert command[2:] == [
        "--lr=1e-4", "--eval", "--bf16", "--layers", "1", "--shift", "-3", "--seed=4",
        "--output_dir", str(tmp_path / "output_dir"), "model.dtype=fp32",
    ]  # fmt: skip


def test_options_of_a_launcher_stay_before_the_script(tmp_path, monkeypatch):
    pair = command_pair(
        tmp_path,
        monkeypatch,
        "torchrun --nnodes 1 --nproc-per-node 2 train.py --x 1 --x 2",
        "torchrun --nproc-per-node 2 train.py --x 1 --x 3",
    )
    assert list(pair.items) == ["--nnodes", "--x#2"]
    command = pair.form.command(pair.mixed(pair.items), tmp_path)
    assert command[1:] == [
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        "train.py",
        "--x",
        "1",
        "--x",
        "2",
    ]


@pytest.mark.parametrize(
    ("bad", "good", "script", "message"),
    [
        ("bad.yaml", "good.yaml", None, "which script reads these configs"),
        ("bad.yaml", "good.yaml", "trian.py", "no such script: trian.py"),
        ("bad.yml", "good.yaml", "train.py", "unknown config file: `bad.yml`"),
        ("bda.json", "good.yaml", "train.py", "unknown config file: `bda.json`"),
        ("bad.yaml", "train.py --lr 1", "train.py", "two config files, or two command lines"),
        ("bad.yaml", "bad.yaml", "train.py", "BAD and GOOD say the same"),
        ("bad.yaml", "list.yaml", "train.py", "list.yaml: a config is a mapping"),
        ("bad.yaml", "broken.yaml", "train.py", "broken.yaml: not readable"),
        ("train.py --lr 1", "other.py --lr 2", None, "of different programs"),
        ("train.py --lr 1", "train.py --lr 1", None, "say the same"),
        ("train.py --lr 1", "train.py --lr '2", None, "is no command line"),
        ("train.py --lr 1", "train.py --lr 2", "train.py", "goes with two config files"),
    ],
)
def test_bad_input_is_said(files, tmp_path, bad, good, script, message):
    files({"lr": 1}, {"lr": 2})
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(NanstopError, match=message):
        read_pair(bad, good, script)
