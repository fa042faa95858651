"""The fixes of NS115 to NS119 but NS118: resumed, accumulated, evaluated."""

import copy
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.kinds import HEALTHY, Fixes, close, sound
from diagnose.fixes.setup_formats import IDS

FIXES = Fixes()


# NS115 - state that a resumed run has lost
def trainer(out, **options):
    from transformers import Trainer, TrainingArguments

    arguments = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1} | options
    return Trainer(
        tiny.llama(),
        TrainingArguments(**tiny.training_args(out, **arguments)),
        train_dataset=tiny.TokenRows(8),
    )


@FIXES.plant("NS115", 1)
def a_checkpoint_that_is_whole(fixed):
    whole = trainer("whole")
    whole.train()
    resumed = trainer("kept", save_only_model=not fixed, max_steps=2)
    resumed.args.max_steps = 2
    resumed.train()
    again = trainer("kept", save_only_model=not fixed)
    again.train(resume_from_checkpoint="kept/checkpoint-1")
    if fixed:  # as twice the weights, and a little
        folder = Path("kept/checkpoint-1")
        sizes = [(folder / n).stat().st_size for n in ("model.safetensors", "optimizer.pt")]
        assert 1.9 < sizes[1] / sizes[0] < 2.3, sizes
    return all(map(torch.equal, whole.model.parameters(), again.model.parameters()))


def resumed(*, warm):
    """How far AdamW without its moments moves a weight that had gone to rest."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.0)
    for step in range(10):
        optimizer.param_groups[0]["lr"] = 1e-2 * (min(1.0, (step + 1) / 1000) if warm else 1.0)
        weight.grad = torch.full((2,), 1e-6)
        optimizer.step()
    return (weight.detach() - 1).abs().max().item()


@FIXES.plant("NS115", 2)
def a_warm_up_for_moments(fixed):
    return resumed(warm=fixed) < 1e-3


@FIXES.plant("NS115", 3)
def state_dicts_of_all_three(fixed):
    def parts():
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight], lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return weight, optimizer, schedule, torch.amp.GradScaler("cpu")

    def step(weight, optimizer, schedule, scaler, bad=False):
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([1.0, math.nan if bad else 2.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

    first = parts()
    for bad in (True, False, False):
        step(*first, bad=bad)
    kept = copy.deepcopy([each.state_dict() for each in first[1:]])
    second = parts()
    with torch.no_grad():
        second[0].copy_(first[0])
    for part, state in zip(second[1:], kept, strict=True):
        if fixed:
            part.load_state_dict(state)
    for run in (first, second):
        step(*run)
    scales = [run[3].get_scale() for run in (first, second)]
    return torch.equal(first[0], second[0]) and scales == [32768.0, 32768.0]


# NS116 - updates inside the backward
FIXES.say("NS116", 1, "nothing is changed, knowingly")


def updating_in_backward():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return weight


@FIXES.plant("NS116", 2)
def the_loss_is_looked_at_first(fixed):
    weight = updating_in_backward()
    for factor in (1.0, math.nan):
        loss = (weight * factor).sum()
        if not fixed or bool(loss.isfinite()):
            loss.backward()
    return close(weight, torch.full((2,), 0.9))


FIXES.twin("NS116", 3)


@FIXES.plant("NS116", 4)
def a_checkpoint_undoes_it(fixed):
    weight = updating_in_backward()
    kept = weight.detach().clone()
    (weight * math.nan).sum().backward()
    if fixed:
        with torch.no_grad():
            weight.copy_(kept)
    return sound(weight)


# NS117 - accumulation
def window_of(model, counts, loss):
    """The gradient of one weight from micro-batches of these many tokens, and from all at once."""
    rows = [IDS[:, : count + 1] for count in counts]
    weight = model.model.layers[0].self_attn.q_proj.weight
    model.zero_grad()
    for row in rows:
        loss(model, row, sum(counts), len(rows)).backward()
    split = weight.grad.clone()
    model.zero_grad()
    padded = [F.pad(row, (0, 8 - row.shape[1])) for row in rows]
    labels = torch.cat([F.pad(row, (0, 8 - row.shape[1]), value=-100) for row in rows])
    mask = torch.cat([(p != 0).long() for p in padded])
    model(input_ids=torch.cat(padded), attention_mask=mask, labels=labels).loss.backward()
    return sound(split) and close(split, weight.grad)


@FIXES.plant("NS117", 1)
def the_count_of_the_window(fixed):
    def passed(model, row, total, number):
        if fixed:
            return model(input_ids=row, labels=row, num_items_in_batch=torch.tensor(total)).loss
        return model(input_ids=row, labels=row).loss / number

    def divided(model, row, total, _):
        logits = model(input_ids=row).logits[0, :-1]
        return F.cross_entropy(logits, row[0, 1:], reduction="sum") / total

    forms = (passed, divided) if fixed else (passed,)
    return all(window_of(tiny.llama(), (2, 7), form) for form in forms)


@FIXES.plant("NS117", 2)
def a_mean_is_said_to_be_one(fixed):
    """The first logged gradient norm of a mean, at windows of four equal micro-batches."""
    from transformers import Trainer, TrainingArguments

    class Mean(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            del return_outputs, num_items_in_batch
            return model(**inputs).loss

    class Equal(tiny.TokenRows):
        def __getitem__(self, index):
            return super().__getitem__(0)

    norms = []
    for window in (4, 1):
        options = {"max_steps": 1, "gradient_accumulation_steps": window, "max_grad_norm": 1e9}
        arguments = TrainingArguments(**tiny.training_args("out", **options))
        run = Mean(tiny.llama(), arguments, train_dataset=Equal(8))
        if fixed:
            scaled = "loss_is_scaled_for_ga"  # which transformers before 5.23 lack
            setattr(run, scaled if hasattr(run, scaled) else "model_accepts_loss_kwargs", False)
        run.train()
        norms.append(next(e["grad_norm"] for e in run.state.log_history if "grad_norm" in e))
    return math.isclose(*norms, rel_tol=1e-3)


FIXES.twin("NS117", 3)


@FIXES.plant("NS117", 4)
def accumulate_of_accelerate(fixed):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layer = nn.Linear(3, 1, bias=False)
    mean = layer(HEALTHY).square().mean()
    right = layer.weight - 0.1 * torch.autograd.grad(mean, layer.weight)[0]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(layer, optimizer)
    for row in HEALTHY:
        if fixed:
            with accelerator.accumulate(model):
                accelerator.backward(model(row).square().sum())
                optimizer.step()
                optimizer.zero_grad()
        else:
            accelerator.backward(model(row).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    return close(layer.weight, right)


@FIXES.plant("NS117", 5)
def statistics_that_are_not_the_batchs(fixed):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    frozen = nn.BatchNorm1d(4).eval()
    for norm in (nn.GroupNorm(2, 4), frozen) if fixed else (nn.BatchNorm1d(4),):

        def gradient(parts, norm=norm):
            norm.zero_grad()
            for part in parts:
                (norm(part).pow(3).mean() / len(parts)).backward()
            return norm.weight.grad.clone()

        if not close(gradient(x.chunk(4)), gradient([x])):
            return False
    return True


# NS119 - left in evaluation mode
FIXES.twin("NS119", 1)


@FIXES.plant("NS119", 2)
def as_it_was(fixed):
    """A validation that is called in training and in evaluation mode leaves each as it was."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def validate():
        was = model.training
        model.eval()
        model.train(was if fixed else True)

    ends = []
    for mode in (True, False):
        model.train(mode)
        validate()
        ends.append(model.training)
    return ends == [True, False]
