"""`benchmarks/gpu.py` goes through all its parts at toy size, wherever it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PARTS = ("overhead", "trainer", "synchronisations", "gauge", "half", "determinism", "attention")
PARTS += ("defects", "kernels", "full_card")


def gone_through(out, *parts):
    named = [word for part in parts for word in ("--part", part)]
    subprocess.run(
        [sys.executable, str(SCRIPT), "--toy", "--out", str(out), *named],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "140"},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(out.read_text())


@pytest.mark.slow
def test_what_a_device_lacks_is_said(tmp_path):
    found = gone_through(tmp_path / "gpu.json", "gauge", "synchronisations", "attention")
    assert found["machine"]["device"] == "cpu"
    assert found["machine"]["toy"]
    lacks = [lack for part in found["parts"].values() for lack in part["lacks"]]
    assert any("a CPU has none" in lack for lack in lacks)
    assert any("cuDNN attention" in lack for lack in lacks)
    reads = found["parts"]["synchronisations"]["rows"][0]
    assert reads["what"] == "reads of a number"
    assert reads["watched"] - reads["plain"] <= 3


@pytest.mark.slow
def test_every_part_comes_to_its_end(tmp_path):
    found = gone_through(tmp_path / "gpu.json")
    assert tuple(found["parts"]) == PARTS
    assert all(part["rows"] for part in found["parts"].values())
    looks = {row["looks"] for row in found["parts"]["overhead"]["rows"]}
    assert "nanstop" in looks
    row = found["parts"]["full_card"]["rows"][0]
    assert (row["went on"], row["verdict"], row["bad weights"]) == ("yes", "proven", 0)


@pytest.mark.slow
def test_a_fault_inside_a_kernel_is_located(tmp_path):
    found = gone_through(tmp_path / "gpu.json", "kernels")["parts"]["kernels"]
    rows = {(row["kind"], row["run"]): row for row in found["rows"]}
    healthy = {kind: row for (kind, run), row in rows.items() if run == "healthy"}
    assert {"SDPA flash", "SDPA math", "4-bit LoRA", "8-bit AdamW"} == set(healthy)
    assert all(row["outcome"] == "0 incidents, 0 findings" for row in healthy.values())
    assert all(row["bitwise"] for row in healthy.values())
    failed = {kind: row for (kind, run), row in rows.items() if run != "healthy"}
    assert all("weights finite: True" in row["outcome"] for row in failed.values())
    assert all("layers.1" in row["module"] for row in failed.values())
    assert failed["4-bit LoRA"]["op"] == "bitsandbytes.gemm_4bit.default"
    assert failed["4-bit LoRA"]["verdict"] == "proven"
    assert any("torch.compile" in lack for lack in found["lacks"])
