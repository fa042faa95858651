"""A language model with gated linear attention in chunks; gates learn to forget."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny import VOCAB, token_batches

WIDTH, LENGTH = 32, 32


class GatedAttention(nn.Module):
    """Each token reads what is left of the earlier ones: decay is a product of gates."""

    def __init__(self, pairwise: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.parts, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.pairwise = pairwise

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        query, key, value = self.parts(hidden).chunk(3, dim=-1)
        decay = F.logsigmoid(self.gate(hidden)).cumsum(1)
        past = torch.ones(x.shape[1], x.shape[1]).tril()
        if self.pairwise:
            left = (decay - decay.transpose(1, 2)).masked_fill(past == 0, -60.0).exp()
            scores = (query @ key.transpose(1, 2)) * left
        else:
            scores = (query * decay.exp()) @ (key * torch.exp(-decay)).transpose(1, 2)
        return x + self.out((scores * past) @ value) / WIDTH


class Model(nn.Module):
    def __init__(self, pairwise: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GatedAttention(pairwise) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        nn.init.constant_(self.layers[1].gate.bias, -2.4)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(*, pairwise: bool) -> None:
    torch.manual_seed(0)
    model = Model(pairwise)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, batch in enumerate(token_batches(60, rows=4, length=LENGTH)):
        loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        print(
            f"final_loss={model(**token_batches(1, rows=4, length=LENGTH, seed=1)[0]).item():.6f}"
        )


if __name__ == "__main__":
    train(pairwise=False)
