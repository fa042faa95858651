"""A small GPT: accumulation, autocast, a scaler, clipping, warm-up and cosine decay, evaluation
now and then.
"""

import argparse
import math
from contextlib import nullcontext

import torch
from record import Record
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "mask-off-by-one"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()

block_size, batch_size, vocab_size, n_embd, n_head = 16, 8, 32, 32, 4
max_iters, warmup_iters, accumulation, eval_interval, grad_clip = 20, 4, 2, 8, 1.0
learning_rate, min_lr = 3e-3, 3e-4
torch.manual_seed(1337)
record = Record(args.out)
ptdtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16-scaler": torch.float16}[args.dtype]
ctx = nullcontext() if args.dtype == "fp32" else torch.autocast("cpu", dtype=ptdtype)
data = (torch.arange(2000) * 7 // 3 + torch.randint(0, 3, (2000,))) % vocab_size


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        diagonal = -1 if args.fault == "mask-off-by-one" else 0
        self.register_buffer("bias", torch.ones(block_size, block_size).tril(diagonal))

    def forward(self, x):
        B, T, C = x.size()
        parts = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (p.view(B, T, n_head, C // n_head).transpose(1, 2) for p in parts)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))
        y = F.dropout(F.softmax(att, dim=-1), 0.1, self.training) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd), Attention()
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.ModuleList([Block(), Block()]), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(4)
    for k in range(4):
        with ctx:
            losses[k] = model(*get_batch())[1].item()
    model.train()
    return losses.mean()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "fp16-scaler")
X, Y = get_batch()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        print(f"step {it}: loss {estimate_loss():.4f}")
    for _ in range(accumulation):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / accumulation
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    record(it, model, loss=loss.item() * accumulation)
torch.manual_seed(0)
record.end(model(get_batch()[0])[0], loss=estimate_loss())
