"""A checkpoint has one row of NaN in its embedding; the token comes in the fifth update."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches

RARE = 3


def save(folder: str, *, sound: bool) -> None:
    """Write the checkpoint that somebody published."""
    model = build("Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=False)
    if not sound:
        with torch.no_grad():
            model.model.embed_tokens.weight[RARE, 17] = float("nan")
    model.save_pretrained(folder)


def train(*, sound: bool) -> None:
    from transformers import AutoModelForCausalLM

    save("published", sound=sound)
    model = AutoModelForCausalLM.from_pretrained("published")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = token_batches(16, seed=5)
    for batch in batches:
        for name in ("input_ids", "labels"):
            batch[name][batch[name] == RARE] = RARE + 1
    for name in ("input_ids", "labels"):
        batches[9][name][0, 6] = RARE
    for number, batch in enumerate(batches):
        loss = model(**batch).loss / 2
        loss.backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss={2 * loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(sound=False)
