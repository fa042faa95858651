"""OPT learns one vector for each of 32 positions;
a dialogue of 40 tokens has no position for its end.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import build, finish, token_batches

POSITIONS = 32


def dialogues(num: int) -> list[dict[str, Tensor]]:
    """Return dialogues of 20 to 30 tokens, but for one."""
    lengths = [20 + 2 * (number % 6) for number in range(num)]
    lengths[7] = 40
    return [token_batches(1, length=length, seed=n)[0] for n, length in enumerate(lengths)]


def train(*, cut: bool) -> None:
    model = build(
        "OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64, pad_token_id=1,
        max_position_embeddings=POSITIONS, num_hidden_layers=2,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    most = POSITIONS if cut else None
    for number, batch in enumerate(dialogues(12)):
        loss = model(**{name: value[:, :most] for name, value in batch.items()}).loss / 3
        loss.backward()
        if number % 3 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss={3 * loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(cut=False)
