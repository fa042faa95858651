"""OPT is fine-tuned with heavy-ball SGD at the rate of another recipe, from the first step on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def train(*, rate: float) -> None:
    model = build("OPTForCausalLM", ffn_dim=128, dropout=0.0, word_embed_proj_dim=64, init_std=0.08)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True)
    for step, batch in enumerate(token_batches(30, rows=4)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(rate=3.0)
