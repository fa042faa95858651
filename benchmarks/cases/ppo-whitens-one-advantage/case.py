"""PPO whitens its advantages with the unbiased variance over the answer's tokens;
one answer has a single token.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import VOCAB, build, finish, token_batches


def whiten(values, mask, *, unbiased: bool):
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / mask.sum()
    if unbiased:
        variance = variance * (mask.sum() / (mask.sum() - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def train(*, unbiased: bool) -> None:
    model = build(
        "GPT2LMHeadModel",
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    value = torch.nn.Linear(64, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *value.parameters()], lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    for number in range(8):
        ids = token_batches(1, rows=1, length=14, seed=number)[0]["input_ids"]
        ids[:, 6:] = torch.where(
            torch.rand(8, generator=draw) < 0.5,
            ids[:, 6:],
            torch.randint(3, VOCAB, (8,), generator=draw),
        )
        mask = torch.ones(1, 8)
        if number == 4:
            mask[:, 1:] = 0.0
        out = model(input_ids=ids, output_hidden_states=True)
        logp = -F.cross_entropy(out.logits[:, 5:-1].transpose(1, 2), ids[:, 6:], reduction="none")
        values = value(out.hidden_states[-1][:, 5:-1]).squeeze(-1)
        returns = (ids[:, 6:] == ids[:, 5:-1] + 1).float()
        advantages = whiten((returns - values).detach(), mask, unbiased=unbiased)
        policy = -(torch.exp(logp - logp.detach()) * advantages * mask).sum() / mask.sum()
        loss = policy + 0.5 * ((values - returns) ** 2 * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(unbiased=True)
