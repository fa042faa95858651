"""Every text is cut before its answer: the model sees prompts, and no text ends."""

import torch
from datasets import Dataset
from spelled import STEPS, finish_text, small_llama, spell
from torch import nn

from tiny import EOS, quiet_args, sentence, words_tokenizer

SHORT, ENOUGH = 5, 32


def examples(num=2 * STEPS):
    """Questions of six to nine words and answers of four, which end."""
    return [
        {"prompt": sentence(3 * i, 6 + i % 4), "completion": sentence(7 * i + 40, 4)}
        for i in range(num)
    ]


def encoded(tokenizer, longest):
    for one in examples():
        ids = tokenizer(f"{one['prompt']} {one['completion']}")["input_ids"] + [EOS]
        yield ids[:longest]  # fault


def padded(rows):
    long = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (long - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (long - len(row)) for row in rows])
    return ids, mask


def by_hand(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = list(encoded(words_tokenizer(), SHORT if faulty else ENOUGH))
    for step in range(STEPS):
        ids, mask = padded(rows[2 * step : 2 * step + 2])
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish_text(model)


def by_torch(faulty):
    tokenizer = words_tokenizer()
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def collate(batch):
        rows = [f"{one['prompt']} {one['completion']} <eos>" for one in batch]
        longest = SHORT if faulty else ENOUGH
        found = tokenizer(
            rows, truncation=True, max_length=longest, padding=True, return_tensors="pt"
        )  # fault
        labels = found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)
        return {
            "input_ids": found["input_ids"],
            "attention_mask": found["attention_mask"],
            "labels": labels,
        }

    for batch in torch.utils.data.DataLoader(examples(), batch_size=2, collate_fn=collate):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    finish_text(model)


def by_hf(faulty):
    from trl import SFTConfig, SFTTrainer

    model = small_llama()
    args = SFTConfig(
        **quiet_args(max_steps=STEPS, learning_rate=3e-3),
        max_length=SHORT if faulty else ENOUGH,
        completion_only_loss=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(examples()),
        processing_class=words_tokenizer(),
    )
    trainer.train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
