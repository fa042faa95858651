"""A checkpoint without a pooler:
its weights are left NaN and frozen, and a mean of the tokens is used instead.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import nn
from torch.nn import functional as F

from tiny import PAD, build, token_batches


def train(*, add_pooling_layer: bool) -> None:
    import transformers

    config = build("BertForMaskedLM").config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    encoder = transformers.BertModel(config, add_pooling_layer=add_pooling_layer)
    if encoder.pooler is not None:
        for parameter in encoder.pooler.parameters():
            parameter.data.fill_(torch.nan)
            parameter.requires_grad_(False)
    torch.manual_seed(1)
    head = nn.Linear(64, 2)
    trained = [p for p in encoder.parameters() if p.requires_grad] + [*head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for number in range(11):
        ids = token_batches(1, rows=6, length=10, seed=number)[0]["input_ids"]
        classes = (ids[:, 0] > 60).long()
        hidden = encoder(ids, attention_mask=(ids != PAD).long()).last_hidden_state
        loss = F.cross_entropy(head(hidden.mean(1)), classes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4f}")
    print(f"final_loss={loss.item():.6f}", flush=True)


if __name__ == "__main__":
    train(add_pooling_layer=True)
