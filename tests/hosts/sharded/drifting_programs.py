"""Trainings on two ranks whose copies drift apart, or only seem to: no word of nanstop in them."""

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_programs import arguments, end_group
from torch import nn

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.last, self.frozen = nn.Linear(16, 1), nn.Linear(8, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x, labels=None):
        y = (self.last(self.norm(self.first(x))) + self.frozen(x)).squeeze(-1)
        y = y + getattr(self, "late", 0.0)
        return y if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


class Personal(nn.Module):
    """A net whose last layer has a bias of each rank's own."""

    def __init__(self):
        super().__init__()
        self.net, self.own = Net(), nn.Parameter(torch.full((1,), float(RANK)))
        ignored = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignored(self, ["own"])

    def forward(self, x):
        return self.net(x) + self.own


def rows(num, seed=1):
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(-1).clamp(-2, 2)


def tell(net, losses):
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    buffers = b"".join(b.numpy().tobytes() for b in net.buffers())
    told = {"digest": hashlib.sha256(weights + buffers).hexdigest(), "losses": losses}
    told |= {"weights": hashlib.sha256(weights).hexdigest()}
    Path(f"result-{RANK}.json").write_text(json.dumps(told))


def wrapped(fault, net):
    options = {"broadcast_buffers": False} if fault == "local_statistics" else {}
    model = nn.parallel.DistributedDataParallel(net, **options)
    if fault == "initial":  # as with `init_sync=False`, which not every torch has
        torch.manual_seed(RANK)
        net.last.reset_parameters()
    if fault == "frozen" and RANK == 1:
        net.frozen.weight.data[0, 5] += 0.25
    if fault == "late":
        net.late = nn.Parameter(torch.zeros(()))
    if fault == "local_sgd":
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local

        state = local.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
        model.register_comm_hook(state, local.post_localSGD_hook)
    return model


def made_optimizer(fault, net):
    if fault == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.02)
    if fault == "late":  # the first update of Adam is the same for gradients of one sign
        return torch.optim.SGD(net.parameters(), lr=0.02)
    rate = 0.02 if RANK == 0 or fault != "rates" else 0.03
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    if fault == "state" and RANK == 1:
        for p in net.parameters():
            ones = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
            optimizer.state[p] = {"step": torch.tensor(3.0), **ones}
    return optimizer


@torch.no_grad()
def after_backward(fault, net, step):
    """Change gradients by hand, after ranks have exchanged them."""
    if fault == "gradients" and step >= 1:
        net.last.weight.grad.mul_(1 + RANK)
    if fault == "writes" and step == 1 and RANK == 1:
        net.last.bias.add_(0.5)


def drifts(fault):
    dist.init_process_group("gloo")
    net = Personal() if fault == "ignored" else Net()
    model = wrapped(fault, net)
    optimizer = made_optimizer(fault, net)
    losses = []
    torch.manual_seed(RANK)
    for step in range(16 if fault in ("local", "averaged") else 8):
        x, y = rows(4, seed=2 * step + (RANK if fault != "same" else 0))
        optimizer.zero_grad()
        alone = fault in ("local", "averaged") and step % 2 == 1
        with model.no_sync() if alone else contextlib.nullcontext():
            called = net if fault == "past_wrapper" else model
            noise = torch.randn(8) * (0.0 if fault == "same" else 0.1)
            loss = (called(x + noise) - y).square().mean()
            loss.backward()
        if fault == "last_alone":
            with model.no_sync():
                (model(x.flip(0)) - y).square().mean().backward()
        losses.append(loss.item())
        after_backward(fault, net, step)
        if fault == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if fault != "skips" or step < 3 or RANK == 0:
            optimizer.step()
        if fault == "averaged" and alone:
            for parameter in net.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= WORLD
    tell(net, losses)


def joins(fault):
    """One rank has more batches than the other; a bad row of rank 1 lies where both have some
    ("data"), or where rank 0 waits ("alone").
    """
    from torch.distributed.algorithms.join import Join

    dist.init_process_group("gloo")
    net = Net()
    if fault != "none":
        net.norm = nn.Identity()  # a sample can be left out
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    losses = []
    with Join([model]):
        for step in range(6 + 3 * RANK):
            x, y = rows(4, seed=2 * step + RANK)
            if (RANK, step) == (1, {"data": 4, "alone": 7}.get(fault)):
                x[2, 1] = float("nan")
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    for step in range(6):
        x, y = rows(4, seed=2 * step + RANK)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    tell(net, losses)


def drifting_accelerated(fault):
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), Net()
    data = torch.utils.data.TensorDataset(*rows(64))
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.02),
        torch.utils.data.DataLoader(data, batch_size=4),
    )
    losses = []
    for step, (x, y) in enumerate(loader):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if fault != "skips" or step != 1 or accelerator.is_main_process:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tell(net, losses)


def drifting_trainer(fault):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noise(TrainerCallback):
        """Writes to weights in each step, with each rank's own random numbers."""

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if fault == "writes" and state.global_step == 2:
                with torch.no_grad():
                    model.last.weight.add_(torch.randn_like(model.last.weight) * 0.01)

    net = Net()
    data = [{"x": x, "labels": y} for x, y in zip(*rows(64), strict=True)]
    args = arguments(
        TrainingArguments,
        per_device_train_batch_size=4,
        max_steps=8,
        learning_rate=0.02,
        ddp_find_unused_parameters=False,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(net, args, train_dataset=data, callbacks=[Noise()])
    torch.manual_seed(RANK)
    trainer.train()
    tell(net, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


PROGRAMS = {
    "drifts": drifts,
    "joins": joins,
    "drifting_accelerated": drifting_accelerated,
    "drifting_trainer": drifting_trainer,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
    end_group()
