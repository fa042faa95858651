"""One rank of a training whose steps are timed:
``ranks_overhead_program.py KIND STEPS WARM_UP LAYERS HIDDEN LENGTH``.
Without a word of nanstop but for what it sends, which is counted by the names of its threads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import distributed, nn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH = 4


class Sent:
    """What threads of nanstop's send: requests to the store, with keys and values, and what they
    reduce.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        for name in ("set", "get", "add", "check", "wait", "compare_set", "delete_key"):
            self._count(distributed.PrefixStore, name, lambda args: sum(len(str(a)) for a in args))
        of = lambda args: sum(one.nbytes for one in args[0])  # noqa: E731
        self._count(distributed.ProcessGroupGloo, "allreduce", of)

    def _count(self, owner, name, size) -> None:
        original = getattr(owner, name)

        def counted(self_, *args):
            if threading.current_thread().name.startswith("nanstop"):
                self.num_bytes += size(args)
            return original(self_, *args)

        setattr(owner, name, counted)


def model_of(layers: int, hidden: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def main(kind: str, steps: int, warm_up: int, layers: int, hidden: int, length: int) -> None:
    sent, seconds = Sent(), []
    distributed.init_process_group("gloo")
    model: nn.Module = model_of(layers, hidden)
    num_parameters = sum(p.numel() for p in model.parameters())
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for one in model.layers:
            fully_shard(one, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    draw = torch.Generator().manual_seed(RANK)
    before = 0
    for step in range(steps + warm_up):
        x = torch.randn(BATCH, length, hidden, generator=draw)
        if step == warm_up:
            before = sent.num_bytes
        began = time.perf_counter()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= warm_up:
            seconds.append(time.perf_counter() - began)
    told = {"seconds": seconds, "sent": sent.num_bytes - before, "at_first": before}
    told["parameters"] = num_parameters
    Path(f"result-{RANK}.json").write_text(json.dumps(told))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1], *map(int, sys.argv[2:]))
