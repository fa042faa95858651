"""Scripts that train in more than one thread end as they would alone."""

import sys

import pytest

from e2e.scripts import HEAD, run

REPLICAS = (
    HEAD
    + """
import copy
from concurrent.futures import ThreadPoolExecutor

model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
replicas = [model, copy.deepcopy(model)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


def work(job):
    net, x, y = job
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()


with ThreadPoolExecutor(2) as pool:
    for _ in range(30):
        x, y = torch.randn(2, 16, 12), torch.randint(4, (2, 16))
        list(pool.map(work, zip(replicas, x, y)))
        with torch.no_grad():
            for p, q in zip(*(r.parameters() for r in replicas)):
                p.grad.add_(q.grad).div_(2)
        optimizer.step()
        replicas[1].load_state_dict(model.state_dict())
finish(*replicas)
"""
)
ONE_AFTER_THE_OTHER = (
    HEAD
    + """
import threading

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(bad):
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float("nan") if bad else 1.0)).square().mean()
        loss.backward()
        optimizer.step()


for bad in (False, True):
    thread = threading.Thread(target=train, args=(bad,))
    thread.start()
    thread.join()
"""
)


@pytest.mark.slow
def test_two_threads_at_once_are_left_alone(tmp_path):
    (tmp_path / "train.py").write_text(REPLICAS)
    plain, watched = (run(tmp_path, "train.py", watched=watched) for watched in (False, True))
    assert (watched.code, watched.out) == (0, plain.out)
    assert "not watched any more (several threads train at once)" in watched.err
    assert not watched.rows


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="exit codes of signals")
def test_threads_that_follow_each_other_are_watched(tmp_path):
    (tmp_path / "train.py").write_text(ONE_AFTER_THE_OTHER)
    watched = run(tmp_path, "train.py", options=("--on-failure", "observe"))
    assert [row["code"] for row in watched.rows] == ["NS501"]
