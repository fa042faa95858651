"""Sentences are encoded by a frozen encoder;
empty slots come out as NaN and are set to 0 before anything reads them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import nn

from tiny import build, token_batches


def features_of(encoder, words, present, *, skip_empty: bool):
    """Mean of the words' states [documents, sentences, 64]; 0 for a slot without a word."""
    flat, seen = words.flatten(0, 1), present.flatten(0, 1)
    empty = ~seen.any(1)
    with torch.no_grad():
        if skip_empty:
            seen = seen | empty[:, None]
        states = encoder(flat, src_key_padding_mask=~seen)
        means = (states * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
    return torch.where(empty[:, None], 0.0, means).view(*words.shape[:2], 64), ~empty


def train(*, skip_empty: bool) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    frozen = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).requires_grad_(False)
    table = nn.Embedding(128, 64).requires_grad_(False)
    model = build(
        "ElectraForTokenClassification",
        embedding_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(10):
        ids = token_batches(1, rows=12, length=7, seed=number)[0]["input_ids"].view(3, 4, 7)
        present = torch.ones_like(ids, dtype=torch.bool)
        present[number % 3, 3] = False
        features, filled = features_of(frozen, table(ids), present, skip_empty=skip_empty)
        filled = filled.view(3, 4)
        labels = (ids[..., 0] % 2).masked_fill(~filled, -100)
        out = model(inputs_embeds=features, attention_mask=filled.long(), labels=labels)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {out.loss.item():.4f}")
    print(f"final_loss={out.loss.item():.6f}", flush=True)


if __name__ == "__main__":
    train(skip_empty=False)
