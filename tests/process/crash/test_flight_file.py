"""The flight file: what is read back is what was written whole, whenever the writer was killed."""

import os
import random
import signal
import subprocess
import sys
import time
from typing import get_args

import pytest

from nanstop.errors import NanstopError
from nanstop.process.crash.flight_file import NUM_STEPS, PHASES, FlightFile, read
from nanstop.records.vocabulary import Phase

OPERANDS = (("bfloat16", (64, 896)), ("float32", ()))


def record(file, index, *, done=True):
    place = file.op("backward", f"aten.mm.n{index}", "model.layers.0", "m.py:7 forward", OPERANDS)
    if done:
        file.done(place)


def test_every_phase_can_be_written():
    assert get_args(Phase) == PHASES


def test_what_is_written_is_read(tmp_path):
    file = FlightFile(tmp_path / "1.flight", num_ops=4)
    file.step(0)
    record(file, 1)
    record(file, 2, done=False)
    found = read(file.path)
    assert (found.pid, found.step, found.ended, found.torn) == (os.getpid(), 1, None, 0)
    assert [(op.op, op.done, op.step) for op in found.ops] == [
        ("aten.mm.n1", True, 1),
        ("aten.mm.n2", False, 1),
    ]
    last = found.ops[-1]
    assert (last.phase, last.module, last.source) == (
        "backward",
        "model.layers.0",
        "m.py:7 forward",
    )
    assert last.operands == OPERANDS


def test_names_that_are_no_utf8(tmp_path):
    file = FlightFile(tmp_path / "1.flight", num_ops=4)
    file.op("forward", "aten.mm", "", "caf\udce9.py:7 run", ())
    file.ended("OSError", "no file caf\udce9")
    found = read(file.path)
    assert (found.ops[0].source, found.ended) == ("caf?.py:7 run", ("OSError", "no file caf?"))


def test_the_ring_keeps_the_last_ones_in_order(tmp_path):
    file = FlightFile(tmp_path / "1.flight", num_ops=4)
    for index in range(11):
        record(file, index)
    for step in range(NUM_STEPS + 5):
        file.step(step)
    found = read(file.path)
    assert [op.op for op in found.ops] == [f"aten.mm.n{index}" for index in range(7, 11)]
    assert [step for step, _ in found.steps] == list(range(5, NUM_STEPS + 5))
    assert found.step == NUM_STEPS + 5
    times = [at for _, at in found.steps]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic()


def test_a_training_that_is_over_keeps_its_step(tmp_path):
    file = FlightFile(tmp_path / "1.flight")
    file.step(4)
    assert not read(file.path).resting
    file.rest()
    found = read(file.path)
    assert (found.resting, found.step) == (True, 5)
    file.step(5)
    assert not read(file.path).resting


def test_long_names_and_many_operands_fit(tmp_path):
    file = FlightFile(tmp_path / "1.flight", num_ops=2)
    many = [("float32", (index, 123456)) for index in range(100)]
    file.op("forward", "aten._foreach_norm.Scalar", "m" * 500, "f" * 500 + ".py:12 g", many)
    (op,) = read(file.path).ops
    assert op.op == "aten._foreach_norm.Scalar"
    assert op.source.endswith(".py:12 g")
    assert 0 < len(op.operands) < 100
    assert set(op.operands[:-1]) <= set(many)


@pytest.mark.parametrize(
    ("folder", "read_as"),
    [("/home/" + "deep/" * 70, "/home/" + "deep/" * 70), ("/家/" + "很深的文件夹/" * 40, "")],
)
def test_half_a_path_is_never_given_for_a_path(tmp_path, folder, read_as):
    file = FlightFile(tmp_path / "1.flight", num_ops=2)
    file.op("forward", "aten.mm", "", f"{folder}train.py:7 forward", ())
    (op,) = read(file.path).ops
    assert op.source == f"{read_as}train.py:7 forward"


def test_the_end_is_noted(tmp_path):
    file = FlightFile(tmp_path / "1.flight")
    file.ended("OutOfMemoryError", "CUDA out of memory. " + "x" * 5000)
    kind, message = read(file.path).ended
    assert kind == "OutOfMemoryError"
    assert message.startswith("CUDA out of memory.")
    assert read(file.path).ops == ()


def test_a_record_cut_at_any_byte_is_not_read_as_whole(tmp_path):
    file = FlightFile(tmp_path / "1.flight", num_ops=2)
    record(file, 1)
    record(file, 2)
    before = file.path.read_bytes()
    record(file, 3)
    after = file.path.read_bytes()
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    cut = tmp_path / "cut.flight"
    for end in range(changed[0] + 1, changed[-1] + 1):
        cut.write_bytes(after[:end] + before[end:])
        found = read(cut)
        names = [op.op for op in found.ops]
        assert names in (["aten.mm.n2"], ["aten.mm.n2", "aten.mm.n3"])
        assert found.torn == 2 - len(names)


def test_a_forked_child_writes_nothing(tmp_path):
    file = FlightFile(tmp_path / "1.flight", num_ops=4)
    record(file, 1)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from nanstop.process.crash.flight_file import FlightFile\n"
        "file = FlightFile(sys.argv[1], num_ops=4)\n"
        "file.step(3)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    file.step(9); file.op('forward', 'x', '', '', ()); file.ended(); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    other = tmp_path / "2.flight"
    subprocess.run([sys.executable, "-c", code, str(other)], check=True)
    found = read(other)
    assert (found.steps[-1][0], found.ops, found.ended) == (3, (), None)


@pytest.mark.parametrize("damage", [b"", b"x" * 10_000, None])
def test_other_files_are_refused(tmp_path, damage):
    path = tmp_path / "1.flight"
    if damage is None:
        FlightFile(path, num_ops=4)
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(damage)
    with pytest.raises(NanstopError, match="not a flight file"):
        read(path)


def test_a_missing_file_is_said_plainly(tmp_path):
    with pytest.raises(NanstopError, match="cannot read"):
        read(tmp_path / "none")


WRITER = """
import sys
from nanstop.process.crash.flight_file import FlightFile
file = FlightFile(sys.argv[1], num_ops=16)
for index in range(10**9):
    shapes = [("float32", (index,))]
    file.done(file.op("forward", f"aten.op{index}", f"module{index}", f"m.py:{index} f", shapes))
    if index % 8 == 0:
        file.step(index // 8)
"""


def test_killed_at_random_moments_nothing_torn_is_read_as_whole(tmp_path):
    """Every field of a record repeats one number: a mixture of two records would show."""
    moments = random.Random(0)
    for trial in range(12):
        path = tmp_path / f"{trial}.flight"
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        while not path.exists():
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = read(path)
        for op in found.ops:
            index = op.number - 1
            assert op.op == f"aten.op{index}"
            assert (op.module, op.source) == (f"module{index}", f"m.py:{index} f")
            assert op.operands == (("float32", (index,)),)
        numbers = [op.number for op in found.ops]
        assert numbers == sorted(numbers)
        assert found.torn <= 2
        assert [step for step, _ in found.steps] == sorted(step for step, _ in found.steps)
