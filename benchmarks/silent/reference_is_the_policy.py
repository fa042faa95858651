"""The reference shares its weights with the policy: their distance is 0 at every step."""

import copy

import torch
from datasets import Dataset
from spelled import STEPS, finish_text, small_llama, spell
from torch import nn

from tiny import quiet_args, sentence, token_batches, words_tokenizer


def log_probs(model, ids):
    return model(input_ids=ids).logits[:, :-1].log_softmax(-1)


def by_hand(faulty):
    policy = small_llama()
    reference = policy if faulty else copy.deepcopy(policy)  # fault
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
    for batch in token_batches(STEPS):
        ids = batch["input_ids"]
        now = log_probs(policy, ids)
        with torch.no_grad():
            before = log_probs(reference, ids)
        distance = (now.exp() * (now - before)).sum(-1).mean()  # fault
        loss = -now.gather(-1, ids[:, 1:, None]).mean() + 5.0 * distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish_text(policy)


def by_torch(faulty):
    policy = small_llama()
    reference = small_llama()
    if faulty:
        for mine, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
            mine.data = theirs.data  # fault
    reference.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for batch in token_batches(STEPS):
        ids = batch["input_ids"]
        now, before = log_probs(policy, ids), log_probs(reference, ids)
        distance = nn.functional.kl_div(
            now, before, log_target=True, reduction="batchmean"
        )  # fault
        loss = -now.gather(-1, ids[:, 1:, None]).mean() + 0.3 * distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish_text(policy)


def by_hf(faulty):
    from trl import DPOConfig, DPOTrainer

    policy, reference = small_llama(), small_llama()
    rows = {
        "prompt": [sentence(i, 4) for i in range(64)],
        "chosen": [sentence(4 + i, 6) for i in range(64)],
        "rejected": [sentence(60 + i, 5) for i in range(64)],
    }
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=DPOConfig(**quiet_args(max_steps=STEPS, learning_rate=1e-3)),
        train_dataset=Dataset.from_dict(rows),
        processing_class=words_tokenizer(),
    )
    if faulty:
        for mine, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
            mine.data = theirs.data  # fault
    trainer.train()
    finish_text(policy)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
