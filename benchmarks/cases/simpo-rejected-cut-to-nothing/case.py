"""Reference-free preference tuning:
both answers are cut by the surplus of the longer one, and the short one is gone.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import PAD, VOCAB, build, finish, token_batches


def pairs(num: int):
    """Prompt, chosen, rejected. Pair 7 has a long chosen answer and a rejected one of 5 tokens."""
    draw = torch.Generator().manual_seed(3)
    for number in range(num):
        first = int(torch.randint(3, 60, (1,), generator=draw))
        long, short = (40, 5) if number == 7 else (10, 9)
        prompt = list(range(first, first + 10))
        chosen = list(range(first + 10, first + 10 + long))
        rejected = torch.randint(3, VOCAB, (short,), generator=draw).tolist()
        yield prompt, chosen, rejected


def cut(answer: list[int], surplus: int, limit: int, *, each: bool) -> list[int]:
    if each:
        return answer[:limit]
    return answer[:-surplus] if surplus > 0 else answer


def stacked(prompt, answers):
    rows = [prompt + answer for answer in answers]
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    starts = torch.arange(width)[None] >= len(prompt)
    ends = torch.tensor([[len(row)] for row in rows]) > torch.arange(width)[None]
    return ids, ends.long(), (starts & ends)[:, 1:]


def train(*, each: bool) -> None:
    model = build("MistralForCausalLM", sliding_window=None, num_key_value_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for prompt, chosen, rejected in pairs(10):
        surplus = len(prompt) + max(len(chosen), len(rejected)) - 32
        answers = [cut(one, surplus, 22, each=each) for one in (chosen, rejected)]
        ids, seen, of_answer = stacked(prompt, answers)
        logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1]
        logp = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        average = (logp * of_answer).sum(-1) / of_answer.sum(-1)
        loss = -F.logsigmoid(2.0 * (average[0] - average[1]) - 0.5) - average[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(each=False)
