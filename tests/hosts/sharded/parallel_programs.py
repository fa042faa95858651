"""Trainings of several ranks without a wrapper that exchanges gradients: weights in parts that are
computed with together (tensor parallelism), or whole on each, and the script averages.
"""

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_programs import end_group
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def layers():
    """A plan by hand; the last layer lies whole on each rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 1))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (WORLD,)), plan)
    given = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1))
    return net, lambda step: (net(given[step]).squeeze(-1) - given[step].sum(-1)).square().mean()


def plan_of_transformers():
    from transformers import AutoModelForCausalLM

    import tiny

    if RANK == 0:
        tiny.llama().save_pretrained("model")
    dist.barrier()
    net = AutoModelForCausalLM.from_pretrained("model", tp_plan="auto")
    ids = torch.randint(3, 62, (8, 2, 8), generator=torch.Generator().manual_seed(1))
    return net, lambda step: net(input_ids=ids[step], labels=ids[step]).loss


def whole():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    given = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(RANK))
    return net, lambda step: (net(given[step]).squeeze(-1) - given[step].sum(-1)).square().mean()


def averaged(net):
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD


def spoiled(net, fault):
    """Have rank 1's part of what a middle layer makes hold a NaN, in step 3."""
    layer = net[2] if isinstance(net, nn.Sequential) else net.model.layers[1].mlp.down_proj
    met = (number for number in itertools.count())  # which nobody can put back

    def hook(_module, _given, made):
        if next(met) == 3 and RANK == 1 and fault == "part":
            part = getattr(made, "_local_tensor", made)
            made = made.clone() if part is made else made
            getattr(made, "_local_tensor", made).detach().view(-1)[0] = float("nan")
        return made

    layer.register_forward_hook(hook)


def main(kind, fault):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    made = {"layers": layers, "transformers": plan_of_transformers, "whole": whole}
    net, loss_of = made[kind]()
    if fault == "part":
        spoiled(net, fault)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    losses = []
    for step in range(8):
        loss = loss_of(step)
        fails = (fault, step) == ("loss", 3) and (kind != "whole" or RANK == 1)
        loss = loss * float("nan") if fails else loss
        optimizer.zero_grad()
        loss.backward()
        if kind == "whole":
            averaged(net)
        optimizer.step()
        losses.append(str(loss.item()))
    mine = (getattr(p, "_local_tensor", p).detach() for p in net.parameters())
    weights = b"".join(one.numpy().tobytes() for one in mine)
    told = {"digest": hashlib.sha256(weights).hexdigest(), "losses": losses}
    Path(f"result-{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[2:])
    end_group()
