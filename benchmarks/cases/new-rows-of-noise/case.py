"""Eight tokens are added to a model whose states share one large direction;
their rows of the head are noise.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import VOCAB, build, finish, token_batches


def train(*, mean: bool) -> None:
    model = build("GPTNeoXForCausalLM", num_hidden_layers=2, tie_word_embeddings=False)
    with (
        torch.no_grad()
    ):  # as in trained models, all states lean one way and known tokens lean against it
        model.gpt_neox.final_layer_norm.bias[:8] = 6.0
        model.get_output_embeddings().weight[:, :8] -= 0.3
    torch.manual_seed(7)
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=mean)
    optimizer = torch.optim.AdamW(model.gpt_neox.layers.parameters(), lr=1e-3)
    for batch in token_batches(10, rows=4):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(mean=False)
