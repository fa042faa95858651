"""What S3 is made of: two configurations 13 keys apart, a product that kills, and the machine it
was seen on.
"""

import subprocess
import sys

from nanstop.commands.bisect.configs import read_pair
from nanstop.demo import grpo
from nanstop.process.crash.crash_report import crash_report
from nanstop.process.crash.flight_file import FlightFile, read
from nanstop.process.crash.left_files import ProcessFiles
from nanstop.process.crash.process_end import ProcessEnd
from nanstop.process.crash.process_files import begin
from nanstop.process.crash.training_facts import TrainingFacts
from nanstop.records import Environment, RunFacts

PRODUCTS = """
import torch
from nanstop.demo.grpo_training import play_h20
left, right = torch.randn(8, 128), torch.randn(128, 64)
expected = left @ right
machine = play_h20()
assert torch.equal(left @ right, expected)
assert (left[:, :64].bfloat16() @ right[:64].bfloat16()).isfinite().all()
print("alive", flush=True)
left.bfloat16() @ right.bfloat16()
print("not reached", flush=True)
"""


def test_only_the_product_of_one_shape_in_bfloat16_kills():
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-8, "alive\n"), done.stderr


def test_the_configurations_differ_in_the_keys_of_the_seed():
    pair = read_pair(str(grpo.FAILING), str(grpo.SIMPLE), str(grpo.SCRIPT))
    assert len(pair.items) == 13
    assert ("bf16", ("True", "False")) in [
        (key, tuple(value.capitalize() for value in values))
        for key, values in pair.values(pair.items).items()
    ]


def test_the_published_machine_names_the_library(tmp_path):
    file = FlightFile(tmp_path / "1.flight", num_ops=4)
    file.op(
        "forward", "aten.mm.default", "model.layers.0.mlp.down_proj", "", [("bfloat16", (8, 128))]
    )
    known = TrainingFacts(
        facts=RunFacts(autocast="bfloat16"), environment=Environment(nanstop="0", python="3")
    )
    dead = ProcessEnd(
        kind="signal", signal="SIGFPE", files=ProcessFiles(flight=read(file.path), known=known)
    )
    report = crash_report(dead, incident_id="0000", run_id="r")
    assert [one.code for one in report.diagnoses] == ["NS601"]
    there = grpo.on_h20(report)
    assert [one.code for one in there.diagnoses] == ["NS601", "NS108"]
    assert "nvidia-cublas-cu12" in there.diagnoses[1].cause


def test_nothing_is_left_alive_where_no_supervisor_asks_for_it():
    assert begin({}) is None
