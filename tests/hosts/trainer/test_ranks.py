"""Two real processes under gloo: what one rank can say of a gradient that they share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.replay.rerun import communicates

RANKS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, fault = dist.get_rank(), sys.argv[1]


def too_early(state, bucket):
    state["calls"] = state.get("calls", 0) + 1
    sent = bucket.buffer().clone()
    if fault == "race" and state["calls"] == 3 and rank == 1:
        sent.fill_(float("nan"))  # the buffer is not written yet
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: done.value()[0] / 2)


class Centred(nn.Module):
    def forward(self, x):
        return x - all_reduce(x.detach().mean(), "sum", dist.group.WORLD) / 2


middle = Centred() if fault == "collective" else nn.ReLU()
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 1)))
net.register_comm_hook({}, too_early)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    x, wanted = torch.randn(4, 8), torch.ones(4, 1)
    if step == 2 and rank == 1 and fault == "rank":
        x[2] = -1e25
    if step == 2 and rank == 1 and fault == "collective":
        wanted[2] = float("inf")
    loss = (net(x) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
dist.destroy_process_group()
"""


def incidents(folder, fault, action):
    """Run the two ranks to their end and return the best code of each rank's incident."""
    (folder / "ranks.py").write_text(RANKS)
    command = ("torchrun", "--nproc-per-node", "2", "ranks.py", fault)
    done = subprocess.run(
        [sys.executable, "-m", "nanstop", "run", "--out", "incidents", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )
    assert (done.returncode, done.stdout) == (0, "done\n" * 2), done.stderr
    rows = json.loads(Path(folder, "incidents", "summary.json").read_text())["incidents"]
    assert all(row["action"] == action for row in rows)
    return {row["rank"]: (row["code"], row["confidence"], row["step"]) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "action", "codes"),
    [
        ("race", "skip", {0: ("NS606", "possible", 2)}),
        ("rank", "skip", {1: ("NS504", "likely", 2)}),
        ("collective", "skip", {1: ("NS000", "possible", 2)}),
    ],
)
def test_what_the_ranks_say(tmp_path, fault, action, codes):
    """Where only the exchange is bad the step is to be run again, which a hook stands in the way
    of: its update is skipped.
    """
    assert incidents(tmp_path, fault, action) == codes


def test_a_step_without_collectives_runs_alone():
    net = nn.Linear(4, 1)
    step = FnStep(net, lambda model, batch: model(batch["x"]).mean(), [{"x": torch.ones(2, 4)}])
    assert communicates(step) == ""


def test_a_collective_is_met_before_it_begins(tmp_path):
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:

        def loss(model, batch):
            distributed.all_reduce(batch["sum"])
            return model(batch["x"]).mean()

        batch = {"x": torch.ones(2, 4), "sum": torch.ones(1)}
        step = FnStep(nn.Linear(4, 1), loss, [batch], world_size=2)
        assert communicates(step).startswith("c10d.allreduce_")
        assert all(p.grad is None for p in step.view.root.parameters())
    finally:
        distributed.destroy_process_group()
