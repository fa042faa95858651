"""The k3 estimate of the KL divergence, taken of whole answers:
their log-ratios add up until exp is infinite.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import copy

import torch
from torch.nn import functional as F

from tiny import build, finish, token_batches


def logps_of(model, ids, num_prompt: int):
    logits = model(ids).logits[:, num_prompt - 1 : -1]
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, num_prompt:], reduction="none")


def train(*, each_token: bool) -> None:
    policy = build("Qwen3ForCausalLM", head_dim=16)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=6e-3)
    for number in range(6):
        first = token_batches(1, rows=4, length=8, seed=number)[0]["input_ids"][:, :1]
        ids = 3 + (first + torch.arange(208)) % 120
        advantages = torch.tensor([-1.0, -1.0, -1.0, -0.5])  # every answer was poor
        logps = logps_of(policy, ids, 8)
        with torch.no_grad():
            ref_logps = logps_of(reference, ids, 8)
        if not each_token:
            logps, ref_logps = logps.sum(1, keepdim=True), ref_logps.sum(1, keepdim=True)
        log_ratio = ref_logps - logps
        kl = torch.exp(log_ratio) - log_ratio - 1
        loss = (0.002 * kl - logps * advantages[:, None] / 10).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4g} log-ratio {log_ratio.abs().max().item():.3g}")
    finish(policy, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(each_token=False)
