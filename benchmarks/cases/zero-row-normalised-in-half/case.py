"""Unit embeddings in float16: an added token has a row of zeros, and 1e-12 is 0 in that format."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from tiny import VOCAB, build, finish, token_batches


class UnitEmbedding(nn.Embedding):
    """An embedding whose rows have norm one, times the square root of the width."""

    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x).to(torch.float16)
        unit = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(1e-12)
        return unit.float() * self.embedding_dim**0.5


def train(*, zeros: bool) -> None:
    model = build("Qwen2ForCausalLM", tie_word_embeddings=False)
    table = UnitEmbedding(VOCAB + 1, 64)
    with torch.no_grad():
        table.weight[:VOCAB] = model.model.embed_tokens.weight
        table.weight[VOCAB] = 0.0 if zeros else table.weight[:VOCAB].mean(0)
    model.model.embed_tokens = table
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = token_batches(10)
    for batch in batches[6:]:
        batch["input_ids"][0, 0] = VOCAB  # the token that begins a dialogue
        batch["labels"][0, 0] = -100
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(zeros=True)
