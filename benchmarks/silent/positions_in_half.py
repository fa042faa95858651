"""Positions are counted in half: beyond 256 (or 2048) neighbours share one."""

import torch
from spelled import STEPS, settings, spell, tell
from torch import nn
from transformers import Trainer

from tiny import VOCAB, llama, token_batches

LONG = 400


def rows(step):
    """Long texts whose next token hangs on its position's parity."""
    ids = token_batches(1, rows=2, length=LONG % 120, seed=step)[0]["input_ids"]
    return ids.repeat(1, 10)[:, :LONG]


class Sinusoidal(nn.Module):
    """A language model with sines of the position, computed in ``kept``."""

    def __init__(self, kept):
        super().__init__()
        torch.manual_seed(1)
        self.kept = kept
        self.table = nn.Embedding(VOCAB, 32)
        self.mix = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], dtype=self.kept)  # fault
        rates = torch.exp(-torch.arange(16) / 2)
        angles = places[:, None].float() * rates
        h = self.table(ids) + torch.cat([angles.sin(), angles.cos()], dim=-1)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.mix(h, src_mask=causal, is_causal=True))


def by_hand(faulty):
    model = Sinusoidal(torch.bfloat16 if faulty else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        ids = rows(step)
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tell(loss)


class Rotary(nn.Module):
    """Attention whose positions are a running sum of the mask, as with packed or padded rows."""

    def __init__(self, kept):
        super().__init__()
        torch.manual_seed(1)
        self.kept = kept
        self.table, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.inputs = nn.Linear(32, 96)

    def turned(self, x, angles):
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, ids):
        mask = torch.ones(ids.shape, dtype=self.kept)
        places = torch.cumsum(mask, dim=-1)  # fault
        angles = places.float()[..., None] * 10000 ** (-torch.arange(16) / 16)
        h = self.table(ids)
        q, k, v = self.inputs(h).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(
            self.turned(q, angles), self.turned(k, angles), v, is_causal=True
        )
        return self.head(h + mixed)


def by_torch(faulty):
    model = Rotary(torch.bfloat16 if faulty else torch.int64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        ids = rows(step)
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tell(loss)


class Half(nn.Module):
    """Rotary embeddings of a Llama, in half from the position on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, position_ids):
        half = position_ids.to(torch.bfloat16)[..., None]
        angles = half * self.inner.inv_freq.to(torch.bfloat16)  # fault
        angles = torch.cat([angles, angles], dim=-1).float()
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Same(Half):
    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inner.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def by_hf(faulty):
    model = llama(num_hidden_layers=1, max_position_embeddings=512)
    kind = Half if faulty else Same
    model.model.rotary_emb = kind(model.model.rotary_emb)
    data = [{"input_ids": row, "labels": row} for step in range(STEPS) for row in rows(step)]
    Trainer(model=model, args=settings(learning_rate=3e-3), train_dataset=data).train()
    ids = rows(99)
    with torch.no_grad():
        tell(model.eval()(input_ids=ids, labels=ids).loss)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
