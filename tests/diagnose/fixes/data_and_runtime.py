"""The fixes of 5xx and 6xx: data, kernels, memory, ranks."""

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.forward import ZERO
from diagnose.fixes.gradients import bytes_of_adam
from diagnose.fixes.kinds import HEALTHY, Fixes, backpropagated, close, sound
from diagnose.fixes.objectives import padded_with_the_end
from diagnose.fixes.setup_formats import IDS, lora, loss_of
from nanstop.faults.specimen import run_plain
from nanstop.faults.table import ZOO

FIXES = Fixes()


# NS501: input that is not finite
@FIXES.plant("NS501", 1)
def repaired_where_the_batch_is_prepared(fixed):
    """A hole in a column of a table gets the mean of the others, or its row goes."""
    layer = nn.Linear(3, 1)
    holed = torch.cat([HEALTHY, torch.tensor([[math.nan, 1.0, 1.0]])])
    hole = holed.isnan()
    filled = torch.where(hole, holed.nanmean(0), holed)
    for x in (filled, holed[~hole.any(1)]) if fixed else (holed,):
        layer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        if not sound(loss, layer.weight.grad):
            return False
    return True


FIXES.remedy("NS501", 2, "drop_sample", "0:1")
FIXES.remedy("NS501", 3, "drop_micro", "0")


# NS502: ids that the table lacks
def with_id(row, *, labels=None, resize=0):
    model = tiny.llama()
    if resize:
        model.resize_token_embeddings(resize)
    try:
        loss = model(input_ids=row, labels=row if labels is None else labels).loss
    except IndexError:
        return False
    loss.backward()
    return sound(loss, *(p.grad for p in model.parameters()))


@FIXES.plant("NS502", 1)
def the_table_is_resized(fixed):
    return with_id(torch.tensor([[3, 4, 64]]), resize=65 if fixed else 0)


@FIXES.plant("NS502", 2)
def an_existing_token_pads(fixed):
    """A padding token that was added to the tokenizer alone has an id beyond the table."""
    tokenizer = tiny.tokenizer()
    if not fixed:
        tokenizer.add_tokens(["<another>"])
        tokenizer.add_special_tokens({"pad_token": "<new>"})
    row = tokenizer(["w1 w2", "w1"], padding=True, return_tensors="pt")["input_ids"]
    return with_id(row)


FIXES.plant("NS502", 2)(padded_with_the_end)


@FIXES.plant("NS502", 3)
def ignored_labels_are_minus_100(fixed):
    logits = HEALTHY.clone().requires_grad_()
    try:
        loss = F.cross_entropy(logits, torch.tensor([0, -100 if fixed else -1]))
    except IndexError:
        return False
    loss.backward()
    return sound(loss, logits.grad) and not logits.grad[1].any()


FIXES.remedy("NS502", 4, "drop_micro", "0")


# NS503, NS505: labels that are all hidden
def nll(x, keep):
    labels = torch.where(x[:, 0] == 0, -100, 1)
    rows = labels != -100 if keep else slice(None)
    losses = [F.cross_entropy(r[None], y[None]) for r, y in zip(x[rows], labels[rows], strict=True)]
    return torch.stack(losses).sum()


def supervised(max_length, *, cut_prompt=False):
    """Six tokens of prompt, two of answer, cut to ``max_length``."""
    ids = torch.arange(3, 11)
    labels = ids.clone()
    labels[:6] = -100
    kept = slice(-max_length, None) if cut_prompt else slice(max_length)
    model = tiny.llama()
    loss = model(input_ids=ids[kept][None], labels=labels[kept][None]).loss
    loss.backward()
    gradient = model.lm_head.weight.grad
    return sound(loss, gradient) and bool(gradient.any())


@FIXES.plant("NS503", 1)
@FIXES.plant("NS505", 4)
def the_answer_is_not_cut(fixed):
    forms = (supervised(8), supervised(6, cut_prompt=True)) if fixed else (supervised(6),)
    return all(forms)


FIXES.say("NS503", 2, "a look at a decoded row")
FIXES.rows("NS503", 3, "filtered", ZERO, lambda x: nll(x, False), lambda x: nll(x, True))
FIXES.remedy("NS503", 4, "drop_micro", "0")
FIXES.say("NS505", 1, "a look at a decoded row")

GENERATION = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}ANSWER{% endif %}{% endfor %}"


@FIXES.plant("NS505", 2)
def a_template_marks_the_answer(fixed):
    answer = "{{ m.content }}"
    marked = "{% generation %}" + answer + "{% endgeneration %}"
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = GENERATION.replace("ANSWER", marked if fixed else answer)
    talk = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    made = tokenizer.apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["assistant_masks"] == [0, 0, 1, 1]


@FIXES.plant("NS505", 2, slow=True)
def completions_alone(fixed):
    """The labels of a batch of TRL's, from prompts and completions."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    columns = {"prompt": ["w1 w2 "], "completion": ["w3"]}
    config = SFTConfig(**tiny.training_args("out"), completion_only_loss=fixed)
    trainer = SFTTrainer(
        model=tiny.llama(),
        args=config,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tiny.tokenizer(),
    )
    (batch,) = trainer.get_train_dataloader()
    labels = batch["labels"][0].tolist()
    return labels[:2] == [-100, -100] and labels[2] != -100


@FIXES.plant("NS505", 3)
def special_tokens_once(fixed):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    text = "<eos> w1 w2"  # what a template made
    return tokenizer(text, add_special_tokens=not fixed)["input_ids"].count(1) == 1


# NS504: a sample that is far from the others
FIXES.say("NS504", 1, "a look at the data")


@FIXES.plant("NS504", 2)
def robust_units(fixed):
    """One row in other units: normalised by median and quantiles, and clipped."""
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    x[5] *= 1e25
    if fixed:
        low, mid, high = x.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=0)
        robust = (x - mid) / (high - low)
        forms = (robust.clamp(-5, 5),)
    else:
        forms = (x, (x - x.mean(0)) / x.std(0))
    layer = nn.Linear(3, 1)
    for form in forms:
        layer.zero_grad()
        loss = layer(form).square().mean()
        loss.backward()
        spread = form[:5].std()
        if not sound(loss, layer.weight.grad) or not 0.1 < spread < 10:
            return False
    return True


FIXES.remedy("NS504", 3, "drop_sample", "0:1")


# NS506: a constant that is not finite
@FIXES.plant("NS506", 1)
def the_line_of_the_constant(fixed):
    """Weights by inverse counts; an empty class; a mask."""
    counts = torch.tensor([4.0, 0.0, 2.0])
    weights = 1 / (counts.clamp(min=1) if fixed else counts)
    fill = -1e4 if fixed else -math.inf
    value, gradient = backpropagated(lambda x: (x * weights).sum(), HEALTHY)
    hidden = torch.where(counts > 0, 0.0, fill) * 0.5
    masked, slope = backpropagated(lambda x: ((x + hidden).softmax(-1) * hidden).sum(), HEALTHY)
    return sound(value, gradient, masked, slope)


@FIXES.plant("NS506", 2)
def a_running_value_without_what_is_not_finite(fixed):
    mean = torch.ones(())
    for loss in (torch.tensor(2.0), torch.tensor(math.nan), torch.tensor(2.0)):
        if not fixed or torch.isfinite(loss):
            mean = 0.9 * mean + 0.1 * loss.detach()
    return sound(mean) and close(mean, torch.tensor(1.19))


@FIXES.plant("NS506", 3)
def an_assertion_where_it_is_made(fixed):
    """Whether the failure comes at the constant's line, before any loss."""
    try:
        constant = 1 / torch.tensor([1.0, 0.0])
        assert not fixed or constant.isfinite().all(), "here"
    except AssertionError as error:
        return str(error).startswith("here")
    return False


# NS601 to NS603: processes, kernels, chance
FIXES.say("NS601", 1, "nanstop's own recording; tests/process reads it")
FIXES.say("NS601", 2, "another version of a library")
FIXES.say("NS601", 3, "a command; tests/commands runs it on scripts")
FIXES.say("NS601", 4, "a kernel that kills is of one machine")


@FIXES.plant("NS602", 1)
def another_kernel(fixed):
    from contextlib import nullcontext

    from torch.nn.attention import SDPBackend, sdpa_kernel

    specimen = ZOO["NS602"].fault()
    with sdpa_kernel(SDPBackend.MATH) if fixed else nullcontext():
        run = run_plain(specimen)
    exact = specimen.model.double()(specimen.batches[0]["x"].double()).square().mean()
    return run.healthy and math.isclose(run.losses[0], exact.item(), rel_tol=1e-3)


FIXES.say("NS602", 2, "the kernel of a half format that fails alone is of one machine")
FIXES.say("NS602", 3, "a compiler's defect is of one version")
FIXES.say("NS603", 1, "a command; tests/commands runs it on scripts")


@FIXES.plant("NS603", 2)
def memory_that_always_holds_nan(fixed):
    """Whether a read of memory that nobody wrote fails each time."""
    torch.use_deterministic_algorithms(fixed)
    seen = []
    for _ in range(20):
        torch.zeros(4096)  # what the allocator hands out next
        seen.append(bool(torch.empty(4096).isnan().all()))
    torch.use_deterministic_algorithms(False)
    return all(seen)


FIXES.say("NS603", 3, "streams and graphs of a GPU")
FIXES.say("NS603", 4, "a look at a system's log")
FIXES.say("NS603", 5, "a test of a GPU")


# NS604: memory
def kept_bytes(run):
    """The largest tensor that a forward keeps for its backward, and all together."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    return max(sizes.values()), sum(sizes.values()), loss


@FIXES.plant("NS604", 1)
def smaller_batches_and_more_of_them(fixed):
    """Half the memory of a forward, and the same gradient where the window's tokens divide."""
    rows = torch.randint(3, 64, (8, 8))
    model, whole = tiny.llama(), tiny.llama()
    parts = rows.chunk(4 if fixed else 1)
    count = torch.tensor(rows.numel() - len(rows))
    kept = []
    for part in parts:
        _, size, loss = kept_bytes(
            lambda p=part: model(input_ids=p, labels=p, num_items_in_batch=count).loss
        )
        kept.append(size)
        loss.backward()
    _, most, loss = kept_bytes(lambda: whole(input_ids=rows, labels=rows).loss)
    loss.backward()
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert all(map(close, *([p.grad for p in m.parameters()] for m in (model, whole))))
    return max(kept) - weights < (most - weights) / 2


@FIXES.plant("NS604", 2)
def activations_are_computed_again(fixed):
    model, plain = tiny.llama().train(), tiny.llama().train()
    if fixed:
        tiny.recompute(model, reentrant=False)
    rows = torch.randint(3, 64, (8, 16))
    _, size, loss = kept_bytes(lambda: model(input_ids=rows, labels=rows).loss)
    loss.backward()
    _, most, loss = kept_bytes(lambda: plain(input_ids=rows, labels=rows).loss)
    loss.backward()
    same = map(torch.equal, *([p.grad for p in m.parameters()] for m in (model, plain)))
    return all(same) and size < 0.7 * most


@FIXES.cost("NS604", 2)
def one_forward_of_three_more():
    """A step is a forward and two of its size back; each layer is run once more: 4 for 3."""
    model, runs = tiny.llama().train(), []
    tiny.recompute(model, reentrant=False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
    loss_of(model).backward()
    return len(runs) == 2 * len(model.model.layers)


@FIXES.plant("NS604", 3)
def logits_in_parts(fixed):
    """The loss of 64 tokens by parts of 8, each recomputed: no tensor holds all logits."""
    torch.manual_seed(0)
    states, head = torch.randn(64, 8, requires_grad=True), nn.Linear(8, 512)
    labels = torch.randint(0, 512, (64,))

    def loss(size):
        part = lambda h, y: F.cross_entropy(head(h), y, reduction="sum")  # noqa: E731
        parts = zip(states.split(size), labels.split(size), strict=True)
        again = torch.utils.checkpoint.checkpoint
        return sum(again(part, h, y, use_reentrant=False) for h, y in parts) / 64

    whole = F.cross_entropy(head(states), labels)
    (right,) = torch.autograd.grad(whole, states)
    made = loss(8) if fixed else None
    largest, _, value = kept_bytes(lambda: loss(8) if fixed else F.cross_entropy(head(states), labels))
    (gradient,) = torch.autograd.grad(value, states)
    assert made is None or close(made, whole)
    return close(gradient, right) and largest < 64 * 512 * 4


@FIXES.plant("NS604", 3)
def shorter_rows(fixed):
    rows = torch.randint(3, 64, (2, 16 if fixed else 64))
    _, size, _ = kept_bytes(lambda: loss_of_rows(tiny.llama(), rows))
    _, most, _ = kept_bytes(lambda: loss_of_rows(tiny.llama(), rows.new_full((2, 64), 3)))
    return size < most


def loss_of_rows(model, rows):
    return model(input_ids=rows, labels=rows).loss


@FIXES.plant("NS604", 4)
def fewer_bytes_of_state(fixed):
    """Adam's 8 bytes a parameter: of adapters alone, or 2 with an 8-bit state."""
    import bitsandbytes as bnb

    model = lora(tiny.llama()) if fixed else tiny.llama()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert bytes_of_adam(torch.float32) == 16
    weight = nn.Parameter(torch.zeros(8192))
    optimizer = (bnb.optim.AdamW8bit if fixed else torch.optim.AdamW)([weight])
    weight.grad = torch.ones(8192)
    optimizer.step()
    state = optimizer.state[weight].values()
    size = sum(s.numel() * s.element_size() for s in state if torch.is_tensor(s) and s.numel() == 8192)
    return size == 2 * 8192 and trained < 0.05 * sum(p.numel() for p in model.parameters())


FIXES.say("NS604", 5, "the allocator of a GPU")


# NS605 to NS607: ranks
FIXES.say("NS605", 1, "reading a file of nanstop's")


@FIXES.plant("NS605", 2)
def as_many_batches_on_every_rank(fixed):
    """Ten rows in batches of two on three ranks."""
    from torch.utils.data import DataLoader, Subset
    from torch.utils.data.distributed import DistributedSampler

    rows, numbers = list(range(10)), []
    for rank in range(3):
        if fixed:
            sampler = DistributedSampler(rows, num_replicas=3, rank=rank, drop_last=True)
            loader = DataLoader(rows, batch_size=2, sampler=sampler, drop_last=True)
        else:
            loader = DataLoader(Subset(rows, range(rank, 10, 3)), batch_size=3)
        numbers.append(len(loader))
    return len(set(numbers)) == 1


@FIXES.cost("NS605", 2)
def a_few_samples():
    from torch.utils.data.distributed import DistributedSampler

    kept = [len(DistributedSampler(range(10), 3, rank, drop_last=True)) for rank in range(3)]
    return sum(kept) == 9


FIXES.say("NS605", 3, "a worker that hangs holds the tests too; tests/process has children that do")
FIXES.say("NS605", 4, "waiting")
FIXES.say("NS606", 1, "reading reports")
FIXES.twin("NS606", 2)
FIXES.twin("NS606", 3)
FIXES.say("NS606", 4, "another version of a library")
FIXES.twin("NS607", 1)


@cache
def copies_on_two_ranks():
    """Whether they are the same, without and with each fix, by its number."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("two_ranks.py")
        done = subprocess.run(
            [sys.executable, str(script), f"{folder}/store"],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
    return {int(number): pair for number, pair in json.loads(done.stdout).items()}


for number in (2, 3, 4, 5):
    FIXES.named_plant(
        "NS607", number, "two ranks", lambda fixed, n=number: copies_on_two_ranks()[n][fixed]
    )
