"""A reward function of the user divides by the length of the completion; some are empty."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

from tiny import EOS, VOCAB, build, finish, token_batches

ROWS, PROMPT, NEW = 4, 6, 8


def reward(completion: Tensor) -> float:
    """Share of tokens that follow the one before."""
    tokens = completion[completion != EOS]
    hits = (tokens[1:] == tokens[:-1] + 1).float()
    return float(hits.sum() / torch.tensor(float(len(tokens))))


def guarded(completion: Tensor) -> float:
    """As above, and nothing for an empty completion."""
    return reward(completion) if bool((completion != EOS).any()) else 0.0


def sample(model: torch.nn.Module, prompts: Tensor, stops: bool) -> Tensor:
    """Return prompts with NEW sampled tokens; of a batch that ``stops``, one ends at once."""
    ids = prompts
    with torch.no_grad():
        for _ in range(NEW):
            chances = model(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
    if stops:
        ids[2, PROMPT:] = EOS
    return ids


def train(*, score) -> None:
    model = build("SmolLM3ForCausalLM", num_hidden_layers=2, no_rope_layers=[1, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(token_batches(10, rows=ROWS, length=PROMPT)):
        ids = sample(model, batch["input_ids"], stops=step == 4)
        rewards = torch.tensor([score(row[PROMPT:]) for row in ids])
        advantages = rewards - rewards.mean()
        logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1]
        spent = F.cross_entropy(
            logits.reshape(-1, VOCAB), ids[:, PROMPT:].reshape(-1), reduction="none"
        )
        loss = (advantages[:, None] * spent.view(ROWS, NEW)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} reward {rewards.mean().item():.4f} loss {loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(score=reward)
