"""Training scripts without a word of nanstop in them, on one rank or several.

On one rank a window has the micro-batches that several have side by side: it ends where they end.
"""

import contextlib
import datetime
import gc
import hashlib
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from hosts.sharded.planted_faults import SpoiledKernel, planted

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WITH_BAD_DATA = (
    "dies",
    "dawdles",
    "views",
    "policies",
    "clocks",
    "versions",
    "elsewhere",
    "gathers",
    "centred",
    "unclipped",
    "hybrid",
    "wrapped",
    "late",
)
RANKS = WORLD if WORLD > 1 else int(os.environ.get("ALIKE", "2"))


KINK = 2.5


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
        inner = self.first(x)
        if bool((x == KINK).any()):
            inner = with_kink(inner)
        y = self.last(self.loud(inner)).squeeze(-1)
        return y if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


def with_kink(y):
    """Add 0 to the second column, whose derivative there is NaN."""
    flat = (y[:, 1] - y[:, 1].detach()).abs().sqrt()
    return torch.cat([y[:, :1], (y[:, 1] + flat).unsqueeze(1), y[:, 2:]], 1)


def tell(net, losses=(), num_calls=0, **others):
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in net.parameters()]
    weights = b"".join(p.float().numpy().tobytes() for p in whole)
    probe = torch.linspace(-1, 1, 512).view(64, 8).to(net.last.weight.dtype)
    with torch.no_grad():
        end = float((net(probe).float() - probe.float().sum(-1)).square().mean())
    shown = [loss if math.isfinite(loss) else str(loss) for loss in losses]
    told = {"digest": hashlib.sha256(weights).hexdigest(), "loss": end, "losses": shown}
    told |= others | ({"calls": num_calls} if num_calls else {})
    Path(f"result-{RANK}.json").write_text(json.dumps(told))


def rows(fault, num):
    """Return rows and targets; row 29 is one of rank 1 in step 3, at four rows a micro-batch."""
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(1))
    y = x.sum(-1).clamp(-2, 2)
    if fault == "data":
        x[29, 2] = float("nan")
    if fault == "one_row":
        x[29, 2] = KINK
    if fault == "half":
        x[29] *= 4000
        x[45] *= 4000
    if fault == "eps":
        x[:, 0] = 0
    return x, y


def net_with(fault):
    """Return a model; a fault that comes once does so on rank 1 at row 29."""
    return Net(planted(fault, rows("none", 64)[0][29], here=RANK == 1))


def adam(net, fault):
    return torch.optim.AdamW(net.parameters(), lr=0.02, eps=0.0 if fault == "eps" else 1e-8)


class Rows(torch.utils.data.Dataset):
    """Rows that are made of numbers when they are asked for."""

    def __init__(self, fault, num):
        self.x, self.y = (t.tolist() for t in rows(fault, num))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        return torch.tensor(self.x[place]), torch.tensor(self.y[place])


def in_trial(at, does):
    """Return what ``does`` something when rank 1 meets the bad row for the ``at``-th time."""
    met = (number for number in itertools.count(1))  # which nobody can put back

    def hook(x):
        if bool(x.isnan().any()) and next(met) == at:
            does()

    return hook


def gathers(x):
    """Look at a mean over all ranks."""
    shown = [torch.zeros(()) for _ in range(WORLD)]
    if WORLD > 1:
        dist.all_gather(shown, x.mean())
    return torch.stack(shown).mean().item()


class Centred(nn.Module):
    """Takes off the mean over all ranks, which each of them reads."""

    def forward(self, x):
        shown = x.detach().mean()
        if WORLD > 1:
            dist.all_reduce(shown)
        return x - shown / WORLD


def wrapped(net, **options):
    return nn.parallel.DistributedDataParallel(net, **options) if WORLD > 1 else net


class Wrapping(nn.Module):
    """As Fabric has it: the script calls this, and it what exchanges gradients."""

    def __init__(self, inner, net):
        super().__init__()
        self.inner, self.net = inner, net

    def forward(self, x):
        return self.inner(x)


def laid_out(net, **options):
    """FSDP2: every rank has a part of each weight."""
    if WORLD > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if options.pop("is_hybrid", False):  # copies of what lies on several
            names = ("copies", "parts")
            options["mesh"] = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=names)
        else:
            options["mesh"] = init_device_mesh("cpu", (WORLD,))
        fully_shard(net.first, **options)
        fully_shard(net, **options)
    return net


def exchanging(model, *, last):
    """Return a context in which a backward exchanges gradients if it is the ``last``."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


class Disturbance:
    """Sends this process a signal at its ``DISTURB``-th call of a Python function from now on, or
    while one step is looked at, if it is the rank to be disturbed; ``num_calls``: of all so far.
    """

    def __init__(self):
        rank, number, at, *self.step = map(int, os.environ.get("DISTURB", "-1 0 0").split())
        self.signal, self.at, self.num_calls = number, at, 0
        self.is_meant = rank == RANK
        if not self.step:
            self.begin()

    def begin(self):
        if self.is_meant:
            sys.setprofile(self._count)

    @contextlib.contextmanager
    def during(self, step):
        if step not in self.step:
            yield
            return
        self.begin()
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count(self, _frame, event, _argument):
        self.num_calls += event == "call"
        if self.num_calls == self.at:
            os.kill(os.getpid(), self.signal)


def models(fault, *, is_sharded):
    """Return the model, and what a loop calls."""
    hooks = {"dies": in_trial(3, lambda: os._exit(9)), "gathers": gathers}
    hooks["dawdles"] = in_trial(5, lambda: time.sleep(9))
    net = Net(hooks[fault]) if fault in hooks else net_with(fault)
    if fault == "centred":
        net.first = nn.Sequential(Centred(), net.first)
    net = net.half() if fault == "half" else net
    if is_sharded:
        model = laid_out(net, **sharding(fault))
    else:
        model = wrapped(net, gradient_as_bucket_view=fault == "views")
    return net, Wrapping(model, net) if fault == "wrapped" else model


def evaluated_alone(net):
    """Return what a row that is not finite comes to, on this rank alone."""
    net.eval()
    with torch.no_grad():
        losses = [net(torch.full((4, 8), math.nan)).mean().item()]
    net.train()
    return losses


def pretend_another_version():
    from importlib import metadata

    known = metadata.distribution

    class Another:
        version = "0.0.0"

        def read_text(self, _name):
            return "Version: 0.0.0\n"

    metadata.distribution = lambda name: Another() if name == "nanstop" else known(name)


def be_unlike(fault):
    """Have this rank under another nanstop than the others."""
    others = {"policies": {"NANSTOP_ON_FAILURE": "skip"}, "elsewhere": {"NANSTOP_DIR": "elsewhere"}}
    os.environ.update(others.get(fault, {}))
    if fault == "versions":
        pretend_another_version()
    if fault == "clocks":
        known = time.time
        time.time = lambda: known() - 86400.0


def come_late(at):
    if at == (1, int(os.environ.get("LATE_AT", "-1"))):
        time.sleep(float(os.environ["LATE_SECONDS"]))


def loop(fault, accumulate="1", num_steps=8, *, is_sharded=False):
    accumulate = int(accumulate)
    if WORLD > 1:
        seconds = int(os.environ.get("GLOO_SECONDS", "1800"))
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    net, model = models(fault, is_sharded=is_sharded)
    kind = torch.optim.AdamW if fault not in ("half", "mixed") else torch.optim.SGD
    options = {"eps": 0.0} if fault == "eps" else {}
    optimizer = kind(net.parameters(), lr=0.02, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40) if fault == "scaler" else None
    x, y = rows(
        {"mixed": "half"}.get(fault, "data" if fault in WITH_BAD_DATA else fault),
        4 * RANKS * accumulate * num_steps,
    )
    if RANK == 1:
        be_unlike(fault)
    x, y = (t.to(net.last.weight.dtype).split(4) for t in (x, y))
    losses = []
    disturbance = Disturbance()
    kernel = SpoiledKernel(1.01, 0) if fault == "wrong_device" and RANK == 1 else None
    for step in range(num_steps):
        if kernel is not None and step == 3:
            kernel.left = math.inf
        at = (RANK, step)
        if fault == "early" and at == (1, 3):
            break
        ours = range(step * RANKS * accumulate, (step + 1) * RANKS * accumulate)
        mine = ours[RANK::RANKS] if WORLD > 1 else ours
        optimizer.zero_grad()
        for place, part in enumerate(mine):
            last = place == len(mine) - 1
            with exchanging(model, last=last):
                with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                    loss = (model(x[part]) - y[part]).square().mean() / len(mine)
                (scaler.scale(loss) if scaler is not None else loss).backward()
            losses.append(loss.item())
        come_late(at)
        with disturbance.during(step):
            if scaler is not None:
                scaler.unscale_(optimizer)
            if fault not in ("unclipped", "one_row", "late", "own_skip"):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif fault != "own_skip" or at != (1, 3):
            optimizer.step()
        losses += evaluated_alone(net) if fault == "evaluates" and at == (0, 3) else []
    sys.setprofile(None)
    tell(net, losses, disturbance.num_calls)


def classes(fault):
    """A class that is out of range on one rank, or numbers that its loss refuses."""
    dist.init_process_group("gloo")
    net = nn.Linear(8, 3)
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1))
    for step in range(8):
        y = torch.tensor([0, 1, 2, 0])
        if step == 3 and RANK == 1:
            y[2] = 7
        try:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[step] + RANK), y).backward()
            optimizer.step()
        except IndexError:
            if fault != "caught":
                raise


def sharded(fault, accumulate="1"):
    loop(fault, accumulate, is_sharded=True)


def sharding(fault):
    """Return how ``fully_shard`` is called."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}
    options = {"mp_policy": MixedPrecisionPolicy(**half)} if fault in ("mixed", "in_half") else {}
    return options | ({"is_hybrid": True} if fault.startswith("hybrid") else {})


def accelerated(fault, accumulate="1", *, is_sharded=False, with_engine=False):
    from accelerate import Accelerator

    options = {"cpu": True}
    if with_engine:
        from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

        deepspeed_on_a_cpu()
        told = {"gradient_accumulation_steps": int(accumulate), "gradient_clipping": 1.0}
        options = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2, **told)}
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    if is_sharded:
        from accelerate import PartialState
        from accelerate.utils import FullyShardedDataParallelPlugin

        PartialState(cpu=True)
        on_a_gpu_as_it_seems()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        options["fsdp_plugin"] = plugin
    each = int(accumulate) * (1 if WORLD > 1 else RANKS)
    accelerator = Accelerator(gradient_accumulation_steps=each, **options)
    net = net_with(fault)
    data = torch.utils.data.TensorDataset(*rows(fault, 64))
    model, optimizer, loader = accelerator.prepare(
        net,
        adam(net, fault),
        torch.utils.data.DataLoader(data, batch_size=4),
    )
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    tell(accelerator.unwrap_model(model))


def sharded_accelerated(fault, accumulate="1"):
    accelerated(fault, accumulate, is_sharded=True)


def deepspeed_on_a_cpu():
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
    if WORLD == 1:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # for numbers it is
    return deepspeed


def engine(fault, stage="2", formats="float32", accumulate="1", num_steps=8):
    """DeepSpeed's own."""
    deepspeed = deepspeed_on_a_cpu()
    accumulate, dtype = int(accumulate), getattr(torch, formats)
    net = net_with(fault)
    bf16 = {"enabled": True, "check_grad_overflow": not stage.endswith("unguarded")}
    kind = {torch.float16: {"fp16": {"enabled": True}}, torch.bfloat16: {"bf16": bf16}}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(stage[0])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    } | kind.get(dtype, {})
    if stage.endswith("on the host"):
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    groups = [{"params": [*net.first.parameters()]}, {"params": [*net.loud.parameters()]}]
    groups[1]["params"] += [*net.last.parameters()]
    deepspeed.init_distributed("gloo", verbose=False)
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=0.0 if fault == "eps" else 1e-8)
    model, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    x, y = rows("data" if fault == "late" else fault, 4 * RANKS * accumulate * num_steps)
    x, y = (t.to(dtype).split(4) for t in (x, y))
    disturbance, losses = Disturbance(), []
    for place in range(accumulate * num_steps):
        part = place * RANKS + RANK
        loss = (model(x[part]) - y[part]).square().mean()
        model.backward(loss)
        come_late((RANK, place))
        model.step()
        losses.append(loss.item())
    sys.setprofile(None)
    with deepspeed.zero.GatheredParameters([*net.parameters()], enabled=stage == "3"):
        tell(net, losses, disturbance.num_calls, skipped=model.skipped_steps)


def accelerated_engine(fault, accumulate="1"):
    accelerated(fault, accumulate, with_engine=True)


def trainer_engine(fault, accumulate="1"):
    deepspeed_on_a_cpu()
    trainer(fault, accumulate, with_engine=True)


def part_of(data):
    """A rank's own batches of four rows, one after the other in one process."""
    mine = [place for place in range(len(data)) if place // 4 % WORLD == RANK]
    return torch.utils.data.Subset(data, mine)


def fabric(fault, strategy="ddp"):
    """Fabric of Lightning."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=WORLD)
    fabric.launch()
    net = net_with(fault)
    model, optimizer = fabric.setup(net, adam(net, fault))
    loader = torch.utils.data.DataLoader(part_of(Rows(fault, 64)), batch_size=4)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    losses, each = [], 1 if WORLD > 1 else RANKS
    for place, (x, y) in enumerate(loader, 1):
        loss = (model(x) - y).square().mean() / each
        fabric.backward(loss)
        losses.append(loss.item())
        if place % each == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    tell(net, losses)


def lightning(fault, *modes):
    """Lightning's own Trainer; ``modes``: "clips", "accumulates", "validates"."""
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net_with(fault), []

        def training_step(self, batch, at):
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, at):
            made = self.net(batch[0])
            self.log("none_of_all", (made[:0] > 0).float().mean())
            self.log("val_loss", (made - batch[1]).square().mean())

        def configure_optimizers(self):
            return adam(self, fault)

    each = 2 if "accumulates" in modes else 1
    options = {"gradient_clip_val": 1.0} if "clips" in modes else {}
    options["accumulate_grad_batches"] = each * (1 if WORLD > 1 else RANKS)
    if WORLD > 1:
        options["strategy"] = "ddp"
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=WORLD,
        logger=CSVLogger("logs") if "validates" in modes else False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Module()
    loaders = [torch.utils.data.DataLoader(part_of(Rows(fault, 64 * each)), batch_size=4)]
    if "validates" in modes:
        rows_held_out = Rows("none", 8)
        rows_held_out.x[5][2] = math.nan if fault == "held_out" and RANK == 0 else 0.0
        loaders.append(torch.utils.data.DataLoader(rows_held_out, batch_size=4))
    trainer.fit(module, *loaders)
    tell(module.net, module.losses)


def arguments(kind, **options):
    """Options of a short training that leaves nothing behind."""
    usual = {
        "gradient_accumulation_steps": 1 if WORLD > 1 else RANKS,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return kind("trained", **usual | options)


def trl_arguments(kind, **options):
    usual = {"max_steps": 4, "learning_rate": 0.01, "lr_scheduler_type": "constant", "seed": 1}
    return arguments(kind, **usual | options)


def sharded_trainer(fault, accumulate="1"):
    trainer(fault, accumulate, is_sharded=True)


def on_a_gpu_as_it_seems():
    """Have accelerate lay out weights on a CPU too, as it does on whatever else."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def trainer(fault, accumulate="1", *, is_sharded=False, with_engine=False):
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    net = net_with(fault)
    each = int(accumulate)
    data = [{"x": x, "labels": y} for x, y in zip(*rows(fault, 64 * each), strict=True)]
    num_steps = int(os.environ.get("STEPS", "8"))
    options = {"max_steps": num_steps, "learning_rate": 0.02, "ddp_find_unused_parameters": False}
    options["gradient_accumulation_steps"] = each if WORLD > 1 else RANKS * each
    if "SAVE_AT" in os.environ:
        options |= {"save_strategy": "steps", "save_steps": int(os.environ["SAVE_AT"])}
        options |= {"max_grad_norm": 0.0}
    if is_sharded:
        layers = {"version": 2, "transformer_layer_cls_to_wrap": ["Loud"]}
        options |= {"fsdp": True, "fsdp_config": layers}
    if with_engine:
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
        config |= {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
        options["deepspeed"] = config | {"gradient_clipping": 1.0}
    eps = 0.0 if fault == "eps" else 1e-8
    args = arguments(TrainingArguments, per_device_train_batch_size=4, adam_epsilon=eps, **options)
    if is_sharded and args.world_size > 1:
        on_a_gpu_as_it_seems()
    trained = InOrder(net, args, train_dataset=data)
    trained.train()
    tell(trained.model)


class Spoiled(nn.Embedding):
    """An input layer that divides by 0 at token 62, of which there is one in the data."""

    def forward(self, ids):
        return super().forward(ids) / (ids != 62).unsqueeze(-1)


def spoiled(model):
    inner = model.get_input_embeddings()
    outer = Spoiled(*inner.weight.shape, padding_idx=inner.padding_idx)
    outer.weight = inner.weight
    model.set_input_embeddings(outer)
    return model


def token_rows(fault, num, length=8):
    """Rows of tokens; token 62 is in row 5: of rank 1 in step 2 at one row a micro-batch, of rank 0
    in step 1 at two.
    """
    found = torch.randint(3, 62, (num, length), generator=torch.Generator().manual_seed(1)).tolist()
    if fault == "data":
        found[5][3] = 62
    return found


def sft(fault, batch="1"):
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    from datasets import Dataset

    import tiny

    model = spoiled(tiny.llama())
    data = Dataset.from_dict({"input_ids": token_rows(fault, 16 * int(batch))})
    args = trl_arguments(SFTConfig, per_device_train_batch_size=int(batch), max_length=8)
    trainer = InOrder(model, args, train_dataset=data, processing_class=tiny.tokenizer())
    trainer.train()
    tell_trained(trainer)


def dpo(fault, batch="1"):
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    from datasets import Dataset

    import tiny

    model, rows = spoiled(tiny.llama()), token_rows(fault, 16 * int(batch))
    words = [" ".join(f"w{i - 3}" for i in row) for row in rows]
    data = Dataset.from_dict(
        {
            "prompt": [one[: one.index(" ")] for one in words],
            "chosen": [one[one.index(" ") :] for one in words],
            "rejected": [" ".join(reversed(one.split()[1:])) for one in words],
        }
    )
    args = trl_arguments(DPOConfig, per_device_train_batch_size=int(batch), max_length=16)
    reference = tiny.llama()
    trainer = InOrder(
        model, reference, args=args, train_dataset=data, processing_class=tiny.tokenizer()
    )
    trainer.train()
    tell_trained(trainer)


def tell_trained(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    timed = ("runtime", "per_second")
    logged = [
        {k: v for k, v in entry.items() if not k.endswith(timed)}
        for entry in trainer.state.log_history
    ]
    with torch.no_grad():
        end = float(model(torch.arange(3, 35).view(4, 8)).logits.double().square().mean())
    told = {"digest": hashlib.sha256(weights).hexdigest(), "loss": end, "logged": logged}
    Path(f"result-{RANK}.json").write_text(json.dumps(told))


def end_group():
    """End the group of ranks when whoever trained in it has gone.

    A DDP model that goes after ``destroy_process_group`` is the last to hold the group: it joins
    gloo's threads with the interpreter's lock held, and one that frees the tensors of a collective
    waits for that lock: for ever, and often on a busy machine (pytorch issue 56297).
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


PROGRAMS = {
    "loop": loop,
    "classes": classes,
    "sharded": sharded,
    "accelerated": accelerated,
    "sharded_accelerated": sharded_accelerated,
    "engine": engine,
    "accelerated_engine": accelerated_engine,
    "trainer_engine": trainer_engine,
    "fabric": fabric,
    "lightning": lightning,
    "trainer": trainer,
    "sharded_trainer": sharded_trainer,
    "sft": sft,
    "dpo": dpo,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
    end_group()
