"""Two ranks that train copies of a layer, as the fixes of NS607 say and otherwise: a script, since
processes that share a thread pool of torch's cannot be made by the tests' own. Prints, as JSON,
whether the copies are the same in the end, by the fix's number: at fault, and with it.
"""

import json
import multiprocessing
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def layer(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()


class Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.inner = layer()
        if gate:
            self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.inner(x) * self.gate


def registered_before(rank, x, fixed):
    del rank
    model = DistributedDataParallel(inner := Gated(fixed))
    if not fixed:
        inner.gate = nn.Parameter(torch.ones(1))
    step(model, x)
    return model


def equal_at_the_start(rank, x, fixed):
    model = DistributedDataParallel(layer(seed=rank))
    if not fixed:  # as with `init_sync=False`, which not every torch has
        model.module.load_state_dict(layer(seed=rank).state_dict())
    step(model, x)
    return model


def the_last_backward_exchanges(rank, x, fixed):
    del rank
    model = DistributedDataParallel(layer())
    with model.no_sync():
        model(x).square().mean().backward()
        if not fixed:
            step(model, x)
    if fixed:
        step(model, x)
    return model


def called_by_its_wrapper(rank, x, fixed):
    del rank
    model = DistributedDataParallel(layer())
    step(model if fixed else model.module, x)
    return model


def from_a_checkpoint(rank, x, fixed):
    model = DistributedDataParallel(layer())
    kept = {name: value.clone() for name, value in model.module.state_dict().items()}
    with model.no_sync():
        step(model, x * (rank + 1))
    if fixed:
        model.module.load_state_dict(kept)
    model.zero_grad()
    step(model, x)
    return model


CASES = {
    2: registered_before,
    3: equal_at_the_start,
    4: the_last_backward_exchanges,
    5: called_by_its_wrapper,
    6: from_a_checkpoint,
}


def run(rank, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    found = {}
    for number, case in CASES.items():
        found[number] = []
        for fixed in (False, True):
            model = case(rank, x, fixed)
            mine = torch.cat([p.detach().flatten() for p in model.parameters()])
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine)
            found[number].append(torch.equal(*both) and bool(mine.isfinite().all()))
    if rank == 0:
        out.put(found)
    del model  # before its group: see `end_group` of tests/hosts/sharded/rank_programs.py
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    ranks = [fork.Process(target=run, args=(rank, sys.argv[1], queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    print(json.dumps(queue.get(timeout=60)))  # noqa: T201 - its answer
    for process in ranks:
        process.join()
