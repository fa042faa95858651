"""A GRPO loop of one's own: rewards are normalised within their group, and the groups have one
completion each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import VOCAB, build, finish, token_batches


def rewards_of(answers):
    return (answers % 2 == 0).float().mean(-1)


def advantages_of(rewards, num_generations: int):
    groups = rewards.view(-1, num_generations)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def train(*, num_generations: int) -> None:
    model = build(
        "Qwen3MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        head_dim=16,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        prompts = token_batches(1, rows=8 // num_generations, length=6, seed=number)[0]["input_ids"]
        prompts = prompts.repeat_interleave(num_generations, 0)
        answers = torch.randint(3, VOCAB, (8, 8), generator=generator)
        ids = torch.cat([prompts, answers], 1)
        advantages = advantages_of(rewards_of(answers), num_generations)
        logits = model(ids).logits[:, 5:-1]
        logp = -F.cross_entropy(logits.transpose(1, 2), answers, reduction="none")
        loss = -(torch.exp(logp - logp.detach()) * advantages[:, None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f} advantage {advantages[0].item():.3f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(num_generations=1)
