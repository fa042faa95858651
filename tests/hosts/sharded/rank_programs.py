"""Training scripts without a word of nanstop in them, on one rank or several.

On one rank a window has the micro-batches that several have side by side: it ends where they end.
"""

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
RANKS = 2


class Loud(nn.Module):
    """Normalizes 64 times its input: in float16 that ends at 1023."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        large = x * 64
        wide = large.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()).to(
            x.dtype
        ) * self.scale


class Net(nn.Module):
    def __init__(self, hook=lambda x: None):
        super().__init__()
        self.first, self.loud, self.last = nn.Linear(8, 16), Loud(), nn.Linear(16, 1)
        self.hook = hook

    def forward(self, x, labels=None):
        self.hook(x)
        y = self.last(self.loud(self.first(x))).squeeze(-1)
        return y if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


def tell(net, losses=()):
    weights = b"".join(p.detach().float().numpy().tobytes() for p in net.parameters())
    probe = torch.linspace(-1, 1, 512).view(64, 8).to(net.first.weight.dtype)
    with torch.no_grad():
        end = float((net(probe).float() - probe.float().sum(-1)).square().mean())
    told = {"digest": hashlib.sha256(weights).hexdigest(), "loss": end, "losses": list(losses)}
    Path(f"result-{RANK}.json").write_text(json.dumps(told))


def rows(fault, num):
    """Return rows and targets; row 29 is one of rank 1 in step 3, at four rows a micro-batch."""
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(1))
    y = x.sum(-1).clamp(-2, 2)
    if fault == "data":
        x[29, 2] = float("nan")
    if fault == "half":
        x[29] *= 4000
        x[45] *= 4000
    if fault == "eps":
        x[:, 0] = 0
    return x, y


def dies_in_trial(at):
    """Return what ends rank 1 when it meets the bad row for the ``at``-th time."""
    met = []

    def hook(x):
        if bool(x.isnan().any()):
            met.append(1)
            if len(met) == at:
                os._exit(9)

    return hook


def wrapped(net, **options):
    return nn.parallel.DistributedDataParallel(net, **options) if WORLD > 1 else net


def loop(fault, accumulate="1", num_steps=8):
    accumulate = int(accumulate)
    if WORLD > 1:
        dist.init_process_group("gloo")
    net = Net(dies_in_trial(3) if fault == "dies" else lambda x: None)
    net = net.half() if fault == "half" else net
    model = wrapped(net, gradient_as_bucket_view=fault == "views")
    kind = torch.optim.AdamW if fault not in ("half",) else torch.optim.SGD
    options = {"eps": 0.0} if fault == "eps" else {}
    optimizer = kind(net.parameters(), lr=0.02, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40) if fault == "scaler" else None
    x, y = rows(
        "data" if fault in ("dies", "views", "policies") else fault,
        4 * RANKS * accumulate * num_steps,
    )
    if fault == "policies" and RANK == 1:
        os.environ["NANSTOP_ON_FAILURE"] = "skip"
    x, y = (t.to(net.first.weight.dtype).split(4) for t in (x, y))
    losses = []
    for step in range(num_steps):
        if fault == "early" and step == 3 and RANK == 1:
            break
        ours = range(step * RANKS * accumulate, (step + 1) * RANKS * accumulate)
        mine = ours[RANK::RANKS] if WORLD > 1 else ours
        optimizer.zero_grad()
        for place, part in enumerate(mine):
            last = place == len(mine) - 1
            with contextlib.nullcontext() if last or WORLD == 1 else model.no_sync():
                with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                    loss = (model(x[part]) - y[part]).square().mean() / len(mine)
                (scaler.scale(loss) if scaler is not None else loss).backward()
            losses.append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    tell(net, losses)
    if WORLD > 1:
        dist.destroy_process_group()


def accelerated(fault, accumulate="1"):
    from accelerate import Accelerator

    each = int(accumulate) * (1 if WORLD > 1 else RANKS)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=each)
    net = Net()
    data = torch.utils.data.TensorDataset(*rows(fault, 64))
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.02),
        torch.utils.data.DataLoader(data, batch_size=4),
    )
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    tell(net)
    if WORLD > 1:
        dist.destroy_process_group()


def trainer(fault):
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    net = Net()
    data = [{"x": x, "labels": y} for x, y in zip(*rows(fault, 64), strict=True)]
    args = TrainingArguments(
        "trained",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1 if WORLD > 1 else RANKS,
        max_steps=8,
        logging_steps=1,
        learning_rate=0.02,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    InOrder(net, args, train_dataset=data).train()
    tell(net)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    {"loop": loop, "accelerated": accelerated, "trainer": trainer}[sys.argv[1]](*sys.argv[2:])
