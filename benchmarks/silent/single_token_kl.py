"""Distances of single tokens are beyond reason; a tiny coefficient hides them in the loss."""

import copy

import torch
from datasets import Dataset
from spelled import STEPS, finish_text, small_llama, spell
from torch import nn

from tiny import quiet_args, sentence, token_batches, words_tokenizer


def models(faulty, sharpness):
    """A sure policy and its reference: at fault, not the model that the policy began as."""
    policy = small_llama(tie_word_embeddings=False)
    with torch.no_grad():
        policy.lm_head.weight.mul_(sharpness)
    other = small_llama(seed=5, tie_word_embeddings=False) if faulty else copy.deepcopy(policy)
    return policy, other.requires_grad_(requires_grad=False).eval()


def log_probs(model, ids):
    logits = model(input_ids=ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def by_hand(faulty):
    policy, reference = models(faulty, 40.0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]
    for batch in token_batches(STEPS, rows=4):
        ids = batch["input_ids"]
        now = log_probs(policy, ids)
        with torch.no_grad():
            gap = log_probs(reference, ids) - now
        estimate = torch.exp(log_probs(reference, ids) - now) - gap - 1  # fault
        loss = (-0.1 * advantage * now + 1e-10 * estimate).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    finish_text(policy)


def by_torch(faulty):
    policy, old_policy = models(faulty, 1.0)
    if faulty:
        with torch.no_grad():
            old_policy.lm_head.weight.mul_(40.0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]
    for batch in token_batches(STEPS, rows=4):
        ids = batch["input_ids"]
        with torch.no_grad():
            old = log_probs(old_policy, ids)
        now = log_probs(policy, ids)
        ratio = torch.exp(now - old)  # fault
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        entropy = nn.functional.cross_entropy(
            policy(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        loss = entropy - 1e-9 * surrogate.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    finish_text(policy)


def by_hf(faulty):
    from trl import DPOConfig, DPOTrainer

    policy, reference = models(faulty, 150.0)
    rows = {
        "prompt": [sentence(i, 4) for i in range(64)],
        "chosen": [sentence(4 + i, 6) for i in range(64)],
        "rejected": [sentence(60 + i, 5) for i in range(64)],
    }
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=DPOConfig(**quiet_args(max_steps=STEPS, learning_rate=1e-4), beta=1e-6),
        train_dataset=Dataset.from_dict(rows),
        processing_class=words_tokenizer(),
    )
    trainer.train()
    finish_text(policy)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
