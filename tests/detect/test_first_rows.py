"""Rows without labels, begun twice or cut are counted as the collator gives them; packed rows, rows
that are padded on the left and prompts that are masked are not told.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import nanstop
from loop_scripts import findings_of
from nanstop.commands.check.check import preflight
from nanstop.commands.check.job import look
from nanstop.detect.first_rows import counted
from nanstop.hosts.trainer.facts import facts_of
from nanstop.hosts.trainer.view import HfView
from nanstop.records import TextFacts

torch.set_num_threads(1)

BOS, EOS, PAD = 1, 2, 0


def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=PAD,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def rows(num=16, length=12, *, begin=(BOS,), end=(EOS,), labels="all", left=0):
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(num):
        inner = length - len(begin) - len(end) - left
        text = torch.randint(3, 64, (inner,), generator=draw)
        ids = torch.tensor([*[PAD] * left, *begin, *text.tolist(), *end])
        target = ids.clone()
        kept = {"all": 0, "answer": length // 2, "none": length, "endless": 0}[labels]
        target[:kept] = -100
        if labels == "endless":
            target[ids == EOS] = -100
        mask = (torch.arange(length) >= left).long()
        made.append({"input_ids": ids, "labels": target, "attention_mask": mask})
    return made


def trainer(data, folder, **options):
    args = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none",
        save_strategy="no", **options,
    )  # fmt: skip
    return Trainer(model=model(), args=args, train_dataset=data)


def checked(data, folder):
    made = trainer(data, folder)
    seen = look(facts_of(HfView(made), made), trainer=made)
    return {one.code: one for one in preflight(seen).findings}


def watched(data, folder):
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)

    def loss_fn(batch):
        logits = made(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        kept = batch["labels"][:, 1:]
        total = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), kept.flatten(), reduction="sum"
        )
        return total / (kept != -100).sum().clamp(min=1)

    with nanstop.watch(made, optimizer, out=folder) as watch:
        for start in range(0, len(data), 4):
            part = data[start : start + 4]
            watch.step(
                loss_fn, {name: torch.stack([row[name] for row in part]) for name in part[0]}
            )
            watch.update(clip=None)
    return {one.code: one for one in watch.findings}


BAD = [
    ({"labels": "none"}, "16 of the first 16 rows hold no label"),
    ({"begin": (BOS, BOS)}, "16 of the first 16 rows begin with two BOS tokens"),
    ({"begin": (BOS, BOS), "left": 3}, "16 of the first 16 rows begin with two BOS tokens"),
]
ENDLESS = "16 of the first 16 rows hold an end after what is trained on, and it is a label in none"
BAD += [({"labels": "endless", "left": 3}, f"{ENDLESS}: the model is not taught to stop")]
GOOD = [
    {"labels": "endless", "end": ()},
    {},
    {"labels": "answer"},
    {"left": 3},
    {"end": ()},
    {"begin": (5, 5)},
    {"begin": (BOS, 5, BOS)},
]


@pytest.mark.parametrize(("shape", "cause"), BAD)
def test_what_cannot_teach_is_counted_before_a_run(shape, cause, tmp_path):
    assert checked(rows(**shape), tmp_path)["NS505"].cause == cause


@pytest.mark.parametrize(("shape", "cause"), BAD)
def test_what_cannot_teach_is_counted_in_a_run(shape, cause, tmp_path):
    assert watched(rows(**shape), tmp_path)["NS505"].cause == cause


@pytest.mark.parametrize("shape", GOOD)
def test_what_teaches_is_left_in_peace(shape, tmp_path):
    assert "NS505" not in checked(rows(**shape), tmp_path / "check")
    assert "NS505" not in watched(rows(**shape), tmp_path / "watch")


def test_an_end_in_what_is_not_trained_on_and_one_that_is_not_told_from_padding_are_none(tmp_path):
    data = rows(labels="answer")
    for row in data:
        row["input_ids"][3] = EOS  # of the prompt
    assert "NS505" not in watched(data, tmp_path)
    text = TextFacts(eos=(PAD, EOS), pad=PAD)
    batch = {name: torch.stack([row[name] for row in rows(labels="endless")]) for name in data[0]}
    view = HfView(trainer(data, tmp_path))
    assert counted(batch, view, text).num_ends_ignored == 16
    del batch["attention_mask"]
    assert counted(batch, view, text).num_ends == 0


def test_a_tokenizer_that_only_a_collator_has_says_what_padding_is(tmp_path):
    """Labels of padding are taken out, and so are those of the end, which is the same token."""
    made = trainer(rows(labels="endless", left=3), tmp_path)
    tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=EOS, pad_token_id=EOS)
    made.data_collator = SimpleNamespace(tokenizer=tokenizer)
    text = facts_of(HfView(made), made).text
    assert (text.pad, EOS in text.eos) == (EOS, True)


def test_rows_of_a_model_that_pads_with_its_beginning_do_not_begin_twice(tmp_path):
    data = [{"input_ids": row["input_ids"].clamp(min=1), **row} for row in rows(left=4)]
    for row in data:
        row["input_ids"] = torch.where(row["input_ids"] == PAD, BOS, row["input_ids"])
    assert "NS505" not in checked(data, tmp_path)


@pytest.mark.parametrize("name", ["labels", "wanted"])
@pytest.mark.parametrize("masked", [True, False])
def test_masks_and_labels_beside_embeddings_are_no_tokens(masked, name, tmp_path):
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)

    def loss_fn(batch):
        part = {key: batch[key] for key in batch if key != name}
        out = made(**part, output_hidden_states=True).hidden_states[-1]
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), batch[name].flatten())

    with nanstop.watch(made, optimizer, out=tmp_path) as watch:
        for _ in range(4):
            batch = {"inputs_embeds": torch.randn(4, 6, 16)}
            batch |= {"attention_mask": torch.ones(4, 6).long()} if masked else {}
            watch.step(loss_fn, batch | {name: torch.tensor([BOS, BOS, 5, 4, 3, 3]).repeat(4, 1)})
            watch.update(clip=None)
    assert watch.findings == ()


def test_labels_that_the_loss_does_not_read_are_no_missing_ones(tmp_path):
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)

    def loss_fn(batch):
        logits = made(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
        )

    with nanstop.watch(made, optimizer, out=tmp_path) as watch:
        for _ in range(4):
            batch = {"input_ids": torch.randint(3, 64, (4, 6))}
            watch.step(loss_fn, batch | {"labels": torch.full((4, 6), -100)})
            watch.update(clip=None)
    assert watch.findings == ()


def test_the_line_that_masks_every_label_is_named(tmp_path):
    def masked(ids):
        return ids.masked_fill(ids.cumsum(1) < 1000, -100)

    def train():
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        for batch in rows():
            ids = batch["input_ids"][None]
            labels = masked(ids)[:, 1:].flatten()
            logits = made(input_ids=ids).logits[:, :-1].flatten(0, 1)
            total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (total / (labels != -100).sum().clamp(min=1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    line, *_ = findings_of(tmp_path, train)["NS505"].lines
    assert line.endswith("return ids.masked_fill(ids.cumsum(1) < 1000, -100)")


@pytest.mark.parametrize(("mask", "num"), [(60, 0), (None, 6)])
def test_places_that_are_drawn_anew_are_no_missing_labels(mask, num, tmp_path):
    """Of 8 short texts 2 had a place hidden, in this batch."""
    ids = torch.arange(40).reshape(8, 5) % 40 + 10
    labels = torch.full_like(ids, -100)
    for row, place in ((1, 0), (1, 2), (1, 3), (5, 1), (5, 4)):
        labels[row, place] = ids[row, place]
        ids[row, place] = ids[row, place] if mask is None else mask
    batch = {"input_ids": ids, "labels": labels}
    found = counted(batch, HfView(trainer(rows(), tmp_path)), TextFacts())
    assert (found.num_rows, found.num_without_labels) == (8, num)
