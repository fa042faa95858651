"""The fixes of 5xx: data."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import tiny
from diagnose.fixes.forward import ZERO
from diagnose.fixes.kinds import HEALTHY, Fixes, backpropagated, close, sound
from diagnose.fixes.objectives import padded_with_the_end

FIXES = Fixes()


# NS501 - input that is not finite
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


# NS502 - ids that the table lacks
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


# NS503 and NS505 (labels that are all hidden)
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


@FIXES.plant("NS505", 5)
def rows_of_each_rank(fixed):
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    rows, read = list(range(8)), []
    for rank in range(2):
        own = DistributedSampler(rows, num_replicas=2, rank=rank) if fixed else None
        torch.manual_seed(0)
        loader = DataLoader(rows, batch_size=4, sampler=own, shuffle=None if fixed else True)
        read += next(iter(loader)).tolist()
    return len(set(read)) == 8


@FIXES.plant("NS505", 6)
def padding_has_a_token_of_its_own(fixed):
    from transformers import DataCollatorForLanguageModeling

    tokenizer = tiny.tokenizer()
    if not fixed:
        tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": [*range(5, 5 + num), tokenizer.eos_token_id]} for num in (2, 4)]
    made = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    return bool((made["labels"] == tokenizer.eos_token_id).any(1).all())


FIXES.say("NS505", 1, "a look at a decoded row")

GENERATION = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {% else %}ANSWER"
    "{% endif %}{% endfor %}"
)


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


# NS504 - a sample that is far from the others
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


@FIXES.plant("NS504", 4)
def an_outlier_among_updates(fixed):
    """One batch of many in other units: its update, clipped or not."""
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    x[20] *= 1e18
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for rows in x.split(4):
        optimizer.zero_grad()
        loss = layer(rows).square().mean()
        loss.backward()
        if fixed:
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    return sound(loss, layer.weight) and float(loss) < 10.0


# NS506 - a constant that is not finite
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
