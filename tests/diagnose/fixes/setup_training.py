"""The fixes of NS111 to NS119: what a training is made of."""

import copy
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.kinds import HEALTHY, Fixes, close, sound
from diagnose.fixes.setup_formats import IDS, lora, loss_of

FIXES = Fixes()


# NS111: an update that rounding swallows
FIXES.remedy("NS111", 1, "fp32_trainables")


@FIXES.plant("NS111", 2)
def adapters_in_float32(fixed):
    """Rates of 1e-6: the adapters of a bfloat16 base, in its format and in float32."""
    model = lora(tiny.llama().to(torch.bfloat16), casts=fixed)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.fill_(0.02)
    before = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model).backward()
    optimizer.step()
    moved = [(p != old).float().mean() > 0.9 for p, old in zip(trained, before, strict=True)]
    return sound(*trained) and all(moved)


def stochastically(weight, update):
    """``weight + update`` in bfloat16, rounded up as often as it is nearer to it."""
    bits = (weight.float() + update).view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).to(torch.bfloat16)


@FIXES.plant("NS111", 3)
def stochastic_rounding(fixed):
    """500 updates of 1e-4 from 1: the mean over 1000 weights is that of float32."""
    weight = torch.ones(1000, dtype=torch.bfloat16)
    update = torch.full((1000,), 1e-4)
    for _ in range(500):
        weight = stochastically(weight, update) if fixed else weight + update.bfloat16()
    return abs(weight.float().mean().item() - 1.05) < 2e-3


@FIXES.plant("NS111", 3)
def kahan_summation(fixed):
    """With what was lost kept in 2 bytes more."""
    weight, lost = torch.ones(10, dtype=torch.bfloat16), torch.zeros(10, dtype=torch.bfloat16)
    assert lost.element_size() == 2
    for _ in range(500):
        update = torch.full((10,), 1e-4).bfloat16() + lost
        new = weight + update
        if fixed:
            lost = update - (new - weight)
        weight = new
    return bool(((weight.float() - 1.05).abs() < 5e-3).all())


@FIXES.cost("NS111", 3)
def an_update_has_noise():
    weight = stochastically(torch.ones(1000).bfloat16(), torch.full((1000,), 1e-3))
    return len(weight.unique()) == 2


@FIXES.plant("NS111", 4)
def a_larger_rate(fixed):
    weight = torch.ones(10, dtype=torch.bfloat16) - (1e-2 if fixed else 1e-3)
    return bool((weight < 1).all())


@FIXES.cost("NS111", 4)
def the_small_updates_are_still_lost():
    one = torch.ones((), dtype=torch.bfloat16)
    return bool(one - 1e-2 < 1 and one - 1e-3 == 1)


# NS112: clipping and the loss scale
def scaled_step(gradient, *, unscaled=True, limit=1.0, scale=1024.0):
    """The update of a weight at 0 by SGD at a rate of 1."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale((weight * gradient).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], limit)
    scaler.step(optimizer)
    return -weight.detach()


@FIXES.plant("NS112", 1)
def unscaled_before_clipping(fixed):
    small, large = torch.tensor([0.3, 0.4]), torch.tensor([3.0, 4.0])
    found = [scaled_step(each, unscaled=fixed) for each in (small, large)]
    return close(found[0], small) and close(found[1], large / 5)


FIXES.twin("NS112", 2)


@FIXES.plant("NS112", 2)
def bfloat16_needs_no_scaler(fixed):
    weight = nn.Parameter(torch.ones(1, 2))
    with torch.autocast("cpu", torch.bfloat16 if fixed else torch.float16):
        y = F.linear(torch.ones(1, 2), weight)
    (1e-8 * y.float()).sum().backward()
    return close(weight.grad / 1e-8, torch.ones(1, 2), within=0.01)


@FIXES.plant("NS112", 3)
def the_norm_is_float32(fixed):
    """300 gradients of 5000: squares and norm leave float16."""
    weight = nn.Parameter(torch.zeros(300).to(torch.float32 if fixed else torch.float16))
    weight.grad = torch.full_like(weight, 5000.0)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    return close(weight.grad.float().norm(), torch.ones(()))


@FIXES.plant("NS112", 4)
def clipped_between_backward_and_step(fixed):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    (weight * torch.tensor([300.0, 400.0])).sum().backward()
    if fixed:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    optimizer.step()
    if not fixed:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    return close(-weight, torch.tensor([0.6, 0.8]))


@FIXES.plant("NS112", 5)
def a_factor_is_taken_off(fixed):
    for factor in (1024.0, 1.0) if fixed else (1024.0,):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (factor * weight * torch.tensor([0.3, 0.4])).sum().backward()
        if fixed:
            weight.grad /= factor
        optimizer.step()
        if not close(-weight, torch.tensor([0.3, 0.4])):
            return False
    return True


# NS113: hyperparameters
FIXES.twin("NS113", 1)
FIXES.say("NS113", 2, "a command; tests/commands runs it on scripts")


@FIXES.plant("NS113", 3)
def a_schedule_of_updates(fixed):
    """16 updates of 4 micro-batches, and a linear decay that should end at 0 with them."""
    from transformers import get_linear_schedule_with_warmup

    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 16)
    rates = []
    for micro in range(64):
        (weight.square().sum() / 400).backward()
        if micro % 4 == 3:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
        if micro % 4 == 3 or not fixed:
            schedule.step()
    return sound(weight) and close(torch.tensor(rates), 1 - torch.arange(16) / 16)


# NS114: no way for a gradient
def checkpointed(*, reentrant, asks=False):
    """A frozen base with adapters, recomputed."""
    model = lora(tiny.llama(use_cache=False))  # a cache would see each token twice
    if asks:
        model.enable_input_require_grads()
    for layer in model.base_model.model.model.layers:
        forward = layer.forward

        def again(hidden, *args, forward=forward, **kwargs):
            run = lambda h: forward(h, *args, **kwargs)  # noqa: E731
            return torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=reentrant)

        layer.forward = again
    loss = loss_of(model.train())
    if not loss.requires_grad:
        return False
    loss.backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    plain = lora(tiny.llama()).train()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    loss_of(plain).backward()
    right = [p.grad for n, p in plain.named_parameters() if "lora_B" in n]
    return all(map(close, gradients, right)) and any(g.any() for g in gradients)


@FIXES.plant("NS114", 1)
def checkpointing_that_is_not_reentrant(fixed):
    return checkpointed(reentrant=not fixed)


@FIXES.plant("NS114", 2)
def inputs_require_gradients(fixed):
    return checkpointed(reentrant=True, asks=fixed)


FIXES.twin("NS114", 3)


@FIXES.plant("NS114", 3)
def what_came_later_is_added(fixed):
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    head = nn.Linear(3, 1)
    before = head.weight.detach().clone()
    if fixed:
        optimizer.add_param_group({"params": list(head.parameters())})
    head(layer(HEALTHY)).sum().backward()
    optimizer.step()
    return sound(head.weight) and not torch.equal(head.weight, before)


@FIXES.plant("NS114", 4)
def a_loss_without_a_detour(fixed):
    layer = nn.Linear(3, 1)
    hidden = layer(HEALTHY)
    detour = hidden.detach().requires_grad_()
    (hidden if fixed else detour).square().mean().backward()
    return layer.weight.grad is not None and sound(layer.weight.grad) and layer.weight.grad.any()


@FIXES.plant("NS114", 5)
def one_of_two_factors_is_random(fixed):
    a, b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
    if fixed:
        nn.init.normal_(a)
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (HEALTHY @ (b @ a).T - 1).square().mean().backward()
        optimizer.step()
    return sound(a, b) and bool(b.any())


# NS115: state that a resumed run has lost
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


# NS116: updates inside the backward
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


# NS117: accumulation
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
            run.loss_is_scaled_for_ga = False
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


# NS119: left in evaluation mode
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
