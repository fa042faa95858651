"""Config files: one reader, whatever they are read for."""

import json

import pytest

from nanstop.errors import NanstopError
from nanstop.store.config_file import config_lines, load_config

SETTINGS = {"learning_rate": 1e-05, "env": {"A": "1"}, "steps": [1, 2], "fp16": True}


@pytest.mark.parametrize("indent", [None, 1, "\t"])
def test_json_is_read_as_json(tmp_path, indent):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SETTINGS, indent=indent))
    assert load_config(file) == SETTINGS


def test_each_key_has_its_line_also_a_merged_one(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env: &env\n  lr: 1\n<<: *env\nfp16: true  # V100\n")
    lines = config_lines(file)
    assert {key: one.line for key, one in lines.items()} == {"lr": 2, "env": 1, "fp16": 4}
    assert lines["fp16"].text == "fp16: true  # V100"
    assert lines.keys() == load_config(file).keys()


@pytest.mark.parametrize("read", [load_config, config_lines])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: [1\n", "not readable"),
        ("a.json", '{"a": ', "not readable"),
        ("a.json", "[" * 100_000, "not readable"),
        ("a.yaml", "- a\n", "a mapping of names"),
        ("a.yaml", "1: a\n", "a mapping of names"),
        ("a.yaml", "", "a mapping of names"),
    ],
)
def test_what_is_no_config_is_said(tmp_path, read, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(NanstopError, match=f"{name}: .*{message}"):
        read(file)
