"""What goes wrong around a run:
an error of ours or a record, never a traceback of ours, never a lost run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from e2e.scripts import HEAD, run, summary

LOOP = (
    HEAD
    + """
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    loss = net(torch.randn(4, 4)).square().mean()
    if BAD and step == 2:
        loss = (loss - loss).log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(net)
"""
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


@pytest.fixture
def cli(call, monkeypatch):
    """Run the command line in a folder: (exit code, stdout, stderr), after what must hold of every
    bad input.
    """

    def run_in(folder, *arguments):
        monkeypatch.chdir(folder)
        code, out, err = call(*arguments)
        assert "Traceback" not in out + err
        assert "bug in nanstop" not in err
        return code, out, err

    return run_in


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--on-failur", "skip", "loop.py"], "did you mean `--on-failure`?"),
        (["run", "--on-failure", "skp", "loop.py"], "did you mean `skip`?"),
        (["run", "--allow", "dropsample", "loop.py"], "did you mean `drop_sample`?"),
        (["run", "lop.py"], "did you mean `loop.py`?"),
        (["run", "nothing"], "nothing is a folder without __main__.py"),
        (["run"], "missing argument"),
        (["rn", "loop.py"], "did you mean `run`?"),
        (["loop.py"], "try `nanstop run loop.py`"),
        (["report", "nowhere"], "unknown incident folder"),
        (["report", "nothing"], "no incident in nothing"),
        (["explain", "NS20I"], "did you mean `NS20"),
        (["demo", "s1-gemma3"], "did you mean `s1-gemma3-dpo-fp16`?"),
    ],
)
def test_what_is_mistyped_is_said_with_what_was_meant(cli, folder, arguments, said):
    (folder / "nothing").mkdir()
    code, out, err = cli(folder, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[NS001]: ")
    assert said in err


@pytest.fixture(scope="module")
def incident(tmp_path_factory):
    """The incident folder of a run that failed."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "loop.py").write_text(LOOP)
    assert len(run(folder, "loop.py", "bad").rows) == 1
    return folder / "incidents" / "0000"


DAMAGES = {
    "not JSON": lambda f: f.write_text("{"),
    "not a nanstop record": lambda f: f.write_text("[1]"),
    "reads schema 1": lambda f: f.write_text(f.read_text().replace('"schema":1', '"schema":9')),
    "is a link": lambda f: (f.rename(f.with_name("other")), f.symlink_to("other")),
    "larger than 64 MiB": lambda f: os.truncate(f, 2**27),
    "is no id": lambda f: f.write_text(f.read_text().replace('"id":"0000"', '"id":"../x"')),
    "not UTF-8": lambda f: f.write_bytes(b"\xff\xfe"),
    "valid integer": lambda f: f.write_text(f.read_text().replace('"step":2', '"step":"x"')),
    "maximum recursion": lambda f: f.write_text("[" * 100_000),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_tampered_incident_is_refused(cli, incident, tmp_path, said):
    shutil.copytree(incident, tmp_path / "0000")
    DAMAGES[said](tmp_path / "0000" / "report.json")
    code, out, err = cli(tmp_path, "report", "0000")
    assert (code, out) == (2, "")
    assert said in err


def test_json_is_json_whatever_happened(cli, incident):
    code, out, _ = cli(incident.parent, "report", "--json", ".")
    (found,) = json.loads(out)
    assert (code, found["incident"]["id"]) in ((0, "0000"), (3, "0000"))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("out", ["taken", slow("/proc/nowhere"), slow("/dev/full/x")])
def test_a_disk_that_refuses_costs_the_record_and_not_the_run(folder, out):
    (folder / "taken").write_text("")
    ended = run(folder, "loop.py", "bad", out=out)
    assert ended.code == 0
    assert ended.out.endswith(b"finite True\n")
    assert "cannot write" in ended.err
    assert "error[NS" in ended.err
    assert "full record" not in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_switched_off_nothing_is_written(folder):
    ended = run(folder, "loop.py", "bad", NANSTOP="off")
    assert (ended.code, ended.err, ended.summary) == (0, "", {})
    assert ended.out.endswith(b"finite False\n")


@pytest.mark.slow
def test_a_run_inside_a_run_keeps_its_incident(folder):
    (folder / "outer.py").write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'nanstop', 'run', 'loop.py', 'bad']))\n"
    )
    ended = run(folder, "outer.py")
    assert ended.code == 0
    assert [row["step"] for row in ended.rows] == [2]
    assert ended.err.count("error[NS") == 1


def test_output_that_is_no_text_and_lines_of_any_length(folder):
    (folder / "writes.py").write_text(
        "import sys\n"
        "sys.stdout.buffer.write(b'\\xff\\xfe\\x00' + b'x' * 200_000 + b'\\n')\n"
        "sys.stderr.buffer.write(b'\\xff\\n')\n"
        "sys.exit('told')\n"
    )
    alone, watched = run(folder, "writes.py", watched=False), run(folder, "writes.py")
    assert (watched.code, watched.out, watched.err) == (1, alone.out, alone.err)


EMPTY = """
for _ in torch.utils.data.DataLoader([]):
    pass
print("over")
"""
META = """
with torch.device("meta"):
    net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    net(torch.ones(2, 4, device="meta")).sum().backward()
    optimizer.step()
print("over")
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [(EMPTY, "nothing was watched"), slow(META, "a model on `meta` has no values")],
)
def test_nothing_to_train_on_is_no_failure(folder, body, said):
    (folder / "script.py").write_text(HEAD + body)
    ended = run(folder, "script.py")
    assert (ended.code, ended.out, ended.rows) == (0, b"over\n", [])
    assert said in ended.err
    assert "Traceback" not in ended.err


DRAWS = """
draws = {
    seed: torch.rand(40, generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in range(400)
}
SEED = next(seed for seed, drawn in draws.items() if drawn[2] == min(drawn))
LIMIT = draws[SEED][2] + 1e-6
OWN = torch.Generator().manual_seed(SEED)
"""
UNSTEADY = {
    "iterator": (
        "DRAWN = iter([1.0] * 2 + [float('nan')] + [1.0] * 99)\n",
        "net(x).mean() * next(DRAWN)",
        "NS603",
    ),
    "counter": (
        "COUNT = []\n",
        "net(x).mean() * (COUNT.append(1) or (float('nan') if len(COUNT) == 3 else 1.0))",
        "NS603",
    ),
    "generator": (
        DRAWS,
        "(net(x).mean() * 1e-9 + torch.rand((), generator=OWN) - LIMIT).sqrt()",
        "NS000",
    ),
}


@pytest.mark.parametrize("name", [one if one == "iterator" else slow(one) for one in UNSTEADY])
def test_what_cannot_be_repeated_is_told_apart(folder, name):
    state, expression, code = UNSTEADY[name]
    (folder / "script.py").write_text(
        HEAD
        + state
        + f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        net = self.inner
        return {expression}

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    loss = net(torch.randn(4, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("over")
"""
    )
    ended = run(folder, "script.py")
    assert (ended.code, ended.out) == (0, b"over\n")
    assert [row["code"] for row in ended.rows] == [code]
    assert ("its own random generator" in ended.err) == (name == "generator")


@pytest.mark.slow  # real signals against a real clock: they need an idle machine
@pytest.mark.parametrize(("catches", "code"), [(True, 44), (False, 130)])
def test_an_interrupted_investigation_keeps_the_incident_and_ends_as_the_script_says(
    folder, catches, code
):
    (folder / "script.py").write_text(
        HEAD
        + f"""
import os
import time

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        os.write(1, b"forward\\n")  # what a replay prints is not heard
        time.sleep(1.0)
        return x / (x - x)

    @staticmethod
    def backward(ctx, grad):
        return grad

net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
try:
    loss = Slow.apply(net(torch.randn(4, 4)).square().mean())
    loss.backward()
    optimizer.step()
except KeyboardInterrupt:
    if {catches}:
        sys.exit(44)
    raise
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "nanstop", "run", "--out", "incidents", "script.py"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for _ in range(2):  # the second is a replay's
            assert process.stdout.readline() == "forward\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert "nanstop/" not in err.replace("nanstop explain", "")
    found = summary(folder)
    assert (len(found["incidents"]), found["exit"]) == (1, code)
    assert found["incidents"][0]["action"] == "continue"
