"""A cross-attention connector over image features:
one sample of a batch has no image, so all its keys are masked.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny import build, token_batches


class Captioner(nn.Module):
    """A language model that adds what its text finds in the patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.text = build("OPTModel", ffn_dim=128, word_embed_proj_dim=64, num_hidden_layers=2)
        self.connector = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 128)

    def forward(self, ids: Tensor, patches: Tensor, missing: Tensor) -> Tensor:
        states = self.text(input_ids=ids).last_hidden_state
        seen, _ = self.connector(states, patches, patches, key_padding_mask=missing)
        return self.head(states + seen)


def samples(num: int, *, placeholder: bool, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return batches of three texts with 5 to 8 patches each; now and then a text has no image."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number, batch in enumerate(token_batches(num, rows=3, length=12, seed=seed)):
        patches = torch.randn(3, 8, 64, generator=generator)
        counts = torch.randint(5, 9, (3,), generator=generator)
        if number % 8 == 3:
            counts[2] = 1 if placeholder else 0
        missing = torch.arange(8) >= counts[:, None]
        batches.append({"ids": batch["input_ids"], "patches": patches, "missing": missing})
    return batches


def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def train(*, placeholder: bool) -> None:
    model = Captioner()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in samples(10, placeholder=placeholder):
        loss = error(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss={loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={error(model, samples(1, placeholder=True, seed=1)[0]).item():.6f}")


if __name__ == "__main__":
    train(placeholder=False)
