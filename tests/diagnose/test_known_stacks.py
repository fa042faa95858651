"""Every row of the table matches what it is about and nothing beside it:
each condition, each end of each range.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.evidence import ended, event, evidence, group, incident, localization
from nanstop.diagnose.diagnose import diagnose
from nanstop.diagnose.evidence import stacks as stacks_module
from nanstop.diagnose.evidence.stacks import in_range, stacks
from nanstop.diagnose.findings.setup.ns108_known_bad_stack import check
from nanstop.records import Environment, Evidence, RunFacts, TensorStats

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+")
BY_ID = {stack.id: stack for stack in stacks()}
BASE = Environment(nanstop="0", python="3.11", torch="2.13.0")


def machine(packages=None, **fields):
    return replace(BASE, packages=tuple((packages or {}).items()), **fields)


BF16 = RunFacts(autocast="bfloat16", device="cuda")
H20 = machine(gpu="NVIDIA H20", capability="9.0", cublas="12.1.3.1")
HOPPER = machine(gpu="NVIDIA H100 80GB HBM3", capability="9.0")
SDPA = replace(BF16, attention="sdpa")
LEFT = RunFacts(attention="sdpa", padding_side="left")
INT8 = RunFacts(quantization="bitsandbytes-8bit")

MATCHES = {
    "h20-cublas-gemm": [
        (H20, BF16),
        (machine(gpu="NVIDIA H20", cublas="12.1"), BF16),
        (machine(gpu="NVIDIA H20", cublas="12.3.4.0"), BF16),
        (machine(gpu="NVIDIA H20-3e", cublas="12.2.5.6"), RunFacts(param_groups=(group("float16", "w"),))),
    ],
    "hopper-cudnn-attention-mask": [
        (HOPPER, SDPA),
        (machine(capability="9.0", torch="2.11.0"), SDPA),
        (machine(capability="9.0", torch="2.13.9+cu130"), SDPA),
        (machine(capability="9.0", flags=(("cudnn_sdp", "True"),)), SDPA),
    ],
    "sdpa-left-padding": [
        (machine(torch="2.4.1"), LEFT),
        (machine(torch="2.4.9+cu121"), LEFT),
    ],
    "gemma2-sdpa-padding": [
        (machine({"transformers": "4.43.0"}), RunFacts(attention="sdpa", model_type="gemma2")),
        (machine({"transformers": "4.43.9"}), RunFacts(attention="sdpa", model_type="gemma2")),
    ],
    "volta-int8": [
        (machine(gpu="Tesla V100-SXM2-32GB", capability="7.0"), INT8),
        (machine(capability="6.1"), INT8),
    ],
    "flash-attention-2.0-backward": [
        (machine({"flash-attn": version}), RunFacts(attention="flash_attention_2"))
        for version in ("2.0.0", "2.0.4", "2.0.0.post1")
    ],
    "flash-attention-4-blackwell": [
        (machine({"transformer-engine": "2.16.0", "flash-attn-4": "4.0.0b4"}, capability="10.0"), BF16),
    ],
    "inductor-cumsum-mask": [
        (machine({"lerobot": "0.4.0"}, torch="2.11.0"), RunFacts(compiled=True)),
        (machine({"lerobot": "0.6.0"}, torch="2.13.1"), RunFacts(compiled=True)),
    ],
    "deepspeed-overlapped-reduction": [
        (machine({"deepspeed": "0.12.4"}), replace(BF16, world_size=2)),
        (machine({"deepspeed": "0.16.4"}), replace(BF16, world_size=8)),
        (machine({"deepspeed": "0.18.9"}), replace(BF16, world_size=2)),
    ],
    "transformers-accumulation-loss": [
        (machine({"transformers": "4.46.0"}), RunFacts(num_micro=2)),
        (machine({"transformers": "4.49.9"}), RunFacts(num_micro=32)),
    ],
    "mps-up-to-2.2": [
        (machine(torch="2.1.2"), RunFacts(device="mps")),
        (machine(torch="2.2.2"), RunFacts(device="mps")),
    ],
}  # fmt: skip

MISSES = {
    "h20-cublas-gemm": [
        (machine(gpu="NVIDIA H20", cublas="12.3.4.1"), BF16),
        (machine(gpu="NVIDIA H20", cublas="12.4.5.8"), BF16),
        (machine(gpu="NVIDIA H20", cublas="12.0.2"), BF16),
        (machine(gpu="NVIDIA H20", cublas="13.0"), BF16),
        (machine(gpu="NVIDIA H20"), BF16),
        (machine(gpu="NVIDIA H200", cublas="12.1.3.1"), BF16),
        (machine(gpu="NVIDIA H100 80GB HBM3", cublas="12.1.3.1"), BF16),
        (machine(cublas="12.1.3.1"), BF16),
        (H20, RunFacts(param_groups=(group("float32", "w"),))),
    ],
    "hopper-cudnn-attention-mask": [
        (machine(capability="9.0", torch="2.10.1"), SDPA),
        (machine(capability="9.0", torch="2.14.0"), SDPA),
        (machine(capability="8.9"), SDPA),
        (machine(capability="10.0"), SDPA),
        (machine(), SDPA),
        (HOPPER, replace(SDPA, attention="eager")),
        (HOPPER, RunFacts(attention="sdpa")),
        (machine(capability="9.0", flags=(("cudnn_sdp", "False"),)), SDPA),
    ],
    "sdpa-left-padding": [
        (machine(torch="2.5.0"), LEFT),
        (machine(torch="2.5.0a0+872d972e41"), LEFT),
        (machine(torch="2.4.1"), replace(LEFT, padding_side="right")),
        (machine(torch="2.4.1"), replace(LEFT, padding_side=None)),
        (machine(torch="2.4.1"), replace(LEFT, attention="eager")),
        (machine(torch=None), LEFT),
    ],
    "gemma2-sdpa-padding": [
        (machine({"transformers": "4.42.9"}), RunFacts(attention="sdpa", model_type="gemma2")),
        (machine({"transformers": "4.44.0"}), RunFacts(attention="sdpa", model_type="gemma2")),
        (machine({"transformers": "4.43.0"}), RunFacts(attention="sdpa", model_type="gemma")),
        (machine({"transformers": "4.43.0"}), RunFacts(attention="eager", model_type="gemma2")),
    ],
    "volta-int8": [
        (machine(capability="7.5"), INT8),
        (machine(capability="7.0"), RunFacts(quantization="bitsandbytes-4bit")),
        (machine(capability="7.0"), RunFacts()),
        (machine(), INT8),
    ],
    "flash-attention-2.0-backward": [
        (machine({"flash-attn": "1.0.9"}), RunFacts(attention="flash_attention_2")),
        (machine({"flash-attn": "2.0.5"}), RunFacts(attention="flash_attention_2")),
        (machine({"flash-attn": "2.0.4"}), RunFacts(attention="sdpa")),
        (machine(), RunFacts(attention="flash_attention_2")),
    ],
    "flash-attention-4-blackwell": [
        (machine({"transformer-engine": "2.17", "flash-attn-4": "4.0"}, capability="10.0"), BF16),
        (machine({"transformer-engine": "2.15", "flash-attn-4": "4.0"}, capability="10.0"), BF16),
        (machine({"transformer-engine": "2.16"}, capability="10.0"), BF16),
        (machine({"transformer-engine": "2.16", "flash-attn-4": "4.0.1"}, capability="10.0"), BF16),
        (machine({"transformer-engine": "2.16", "flash-attn-4": "4.0"}, capability="9.0"), BF16),
        (machine({"transformer-engine": "2.16", "flash-attn-4": "4.0"}, capability="11.0"), BF16),
    ],
    "inductor-cumsum-mask": [
        (machine({"lerobot": "0.4.0"}, torch="2.14.0"), RunFacts(compiled=True)),
        (machine({"lerobot": "0.4.0"}, torch="2.10.0"), RunFacts(compiled=True)),
        (machine({"lerobot": "0.4.0"}, torch="2.11.0"), RunFacts()),
        (machine(torch="2.11.0"), RunFacts(compiled=True)),
    ],
    "deepspeed-overlapped-reduction": [
        (machine({"deepspeed": "0.12.3"}), replace(BF16, world_size=2)),
        (machine({"deepspeed": "0.19.0"}), replace(BF16, world_size=2)),
        (machine({"deepspeed": "0.16.4"}), BF16),
        (machine({"deepspeed": "0.16.4"}), RunFacts(world_size=2)),
    ],
    "transformers-accumulation-loss": [
        (machine({"transformers": "4.45.2"}), RunFacts(num_micro=2)),
        (machine({"transformers": "4.50.0"}), RunFacts(num_micro=2)),
        (machine({"transformers": "4.46.0"}), RunFacts(num_micro=1)),
    ],
    "mps-up-to-2.2": [
        (machine(torch="2.3.0"), RunFacts(device="mps")),
        (machine(torch="2.1.2"), RunFacts(device="cpu")),
    ],
}  # fmt: skip


def pairs(table):
    return [(name, *pair) for name, rows in table.items() for pair in rows]


def test_every_row_is_tried_on_both_sides():
    assert list(MATCHES) == list(MISSES) == list(BY_ID)


@pytest.mark.parametrize(("name", "environment", "facts"), pairs(MATCHES))
def test_it_matches_its_own_and_no_other_row(name, environment, facts):
    assert [one.id for one in stacks() if one.stands(environment, facts)] == [name]
    found = check(Evidence(environment=environment, facts=facts))
    if BY_ID[name].said_by:
        assert found is None
    else:
        assert (found.where, found.confidence) == (name, "possible")


@pytest.mark.parametrize(("name", "environment", "facts"), pairs(MISSES))
def test_it_does_not_match_its_neighbours(name, environment, facts):
    assert not BY_ID[name].stands(environment, facts)


@pytest.mark.parametrize("stack", stacks(), ids=lambda one: one.id)
def test_rows_speak_plainly_and_name_their_source(stack):
    assert THREAD.fullmatch(stack.source)
    for text in (stack.title, stack.cause, stack.cure):
        assert text
        assert not text.endswith(".")


def test_each_end_of_each_range_has_a_thread_of_its_own():
    table = Path(stacks_module.__file__).with_name("known_stacks.toml")
    for row in tomllib.loads(table.read_text(encoding="utf-8"))["stack"]:
        ranges = {
            name: row["where"].get(name) for name in ("driver", "torch", "cuda", "cublas", "cudnn")
        }
        ranges |= {"capability": row["where"].get("capability")} | row["where"].get("packages", {})
        ends = {
            f"{name} {end}"
            for name, wanted in ranges.items()
            if wanted
            for end in wanted.split(",")
        }
        assert set(row["bounds"]) == ends, row["id"]
        assert all(THREAD.fullmatch(link) for link in row["bounds"].values()), row["id"]


def mm(dtype="bfloat16", op="aten.mm.default", **fields):
    return event(op=op, dtype=dtype, outputs=(), **fields)


def killed(*, name="SIGFPE", op=None, environment=H20, facts=BF16):
    given = ended("signal", (name, ""), op=op)
    return replace(given, incident=replace(given.incident, environment=environment, facts=facts))


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        (killed(op=mm()), True),
        (killed(op=mm(op="aten.addmm.default", dtype="float16")), True),
        (killed(), True),
        (killed(op=mm(dtype="float32")), False),
        (killed(op=mm(op="aten.embedding.default")), False),
        (killed(name="SIGSEGV", op=mm()), False),
        (killed(op=mm(), environment=replace(H20, cublas="12.4.5.8")), False),
    ],
)
def test_a_death_is_explained_only_by_the_defect_that_kills_so(given, fits):
    assert (check(given) is not None) is fits


def backward(length, op="aten._scaled_dot_product_cudnn_attention_backward.default", **fields):
    stats = TensorStats(shape=(2, 14, length, 64), dtype="bfloat16")
    settings = {"phase": "backward", "op": op, "dtype": "bfloat16", "inputs": (stats, stats)}
    return localization(event(**(settings | fields)))


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        (backward(64), True),
        (backward(192), True),
        (backward(128), False),
        (backward(65), False),
        (backward(64, phase="forward"), False),
        (backward(64, op="aten._scaled_dot_product_flash_attention_backward.default"), False),
        (localization(None, phase="backward"), True),
    ],
)
def test_a_bad_value_is_explained_only_by_the_defect_that_makes_it(found, fits):
    given = evidence(found, facts=SDPA)
    there = replace(given.incident, environment=HOPPER, facts=SDPA)
    assert (check(replace(given, incident=there)) is not None) is fits


def test_a_row_about_no_failure_explains_none():
    given = evidence(localization(event()), facts=BF16)
    there = replace(given.incident, environment=machine(capability="7.5"), facts=BF16)
    assert check(replace(given, incident=there)) is None


def test_the_cause_comes_first_and_the_cure_stands_beside_it():
    killer, known = diagnose(killed(op=mm()), "incident")
    assert (killer.code, known.code) == ("NS601", "NS108")
    assert killer.accompanied_by == ("NS108",)
    assert "nvidia-cublas-cu12 >= 12.4.5.8" in known.cause
    assert known.lines[0] == "here: gpu NVIDIA H20, cublas 12.1.3.1"
    assert known.lines[1].endswith("trl/issues/2906")


def test_an_old_incident_of_this_machine_matches_nothing():
    assert check(Evidence(incident=incident(facts=BF16))) is None
    assert check(Evidence(facts=BF16)) is None


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("12.4.5.8", ">=12.1,<12.4.5.8", False),
        ("12.4.5.7", ">=12.1,<12.4.5.8", True),
        ("12.4.5", "<12.4.5.8", True),
        ("12.10", ">=12.2", True),
        ("2.5", "==2.5.0", True),
        ("2.5.1", "<=2.5", False),
        ("2.5.1", ">2.5", True),
        (None, ">=0", False),
        ("unknown", ">=0", False),
    ],
)
def test_ranges_of_versions(version, wanted, inside):
    assert in_range(version, wanted) is inside


def test_a_range_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no clause"):
        in_range("1.0", "~=1.0")
