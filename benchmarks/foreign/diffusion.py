"""Denoising diffusion: noise at a drawn time is foretold, weighted as the bound has it;
then a few samples.
"""

import argparse
import math

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "noise-of-zero"), default="none")
parser.add_argument("--out", default="left.jsonl")
T = 40


class Denoiser(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.dim = dim
        self.time_mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.inp, self.mid, self.out = nn.Linear(2, dim), nn.Linear(dim, dim), nn.Linear(dim, 2)

    def forward(self, x, t):
        freqs = torch.exp(torch.arange(self.dim // 2) * -(math.log(1e4) / (self.dim // 2)))
        angles = t[:, None] * freqs[None]
        emb = self.time_mlp(torch.cat([angles.sin(), angles.cos()], -1))
        h = torch.nn.functional.silu(self.inp(x) + emb)
        return self.out(torch.nn.functional.silu(self.mid(h)))


class Diffusion:
    def __init__(self, fault):
        betas = torch.linspace(1e-3, 0.2, T)
        if fault:
            betas[0] = 0.0  # the first step adds no noise: its weight is 0 / 0
        self.betas = betas
        self.alphas_cumprod = torch.cumprod(1 - betas, 0)

    def loss(self, model, x0):
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        a = self.alphas_cumprod[t, None]
        predicted = model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t)
        beta = self.betas[t, None]
        weight = (beta / (2 * (1 - beta) * (1 - a))).clamp(max=5.0)
        return (weight * (predicted.float() - noise) ** 2).mean()

    @torch.no_grad()
    def sample(self, model, n):
        x = torch.randn(n, 2)
        for i in reversed(range(T)):
            t = torch.full((n,), i)
            alpha, a = 1 - self.betas[i], self.alphas_cumprod[i]
            x = (x - self.betas[i] / (1 - a).clamp(min=1e-4).sqrt() * model(x, t)) / alpha.sqrt()
            if i > 0:
                x += self.betas[i].sqrt() * torch.randn_like(x)
        return x


def main(args):
    torch.manual_seed(31)
    record = Record(args.out)
    model, diffusion = Denoiser(), Diffusion(args.fault == "noise-of-zero")
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    half = torch.bfloat16 if args.dtype == "bf16" else torch.float16
    scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "fp16-scaler")
    angle = torch.rand(25, 32) * 2 * math.pi
    data = torch.stack([angle.cos(), angle.sin()], -1)
    for step, x0 in enumerate(data):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=half, enabled=args.dtype != "fp32"):
            loss = diffusion.loss(model, x0)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        record(step, model, loss=loss.item())
    torch.manual_seed(32)
    healthy = Diffusion(fault=False)
    record.end(healthy.sample(model, 16), loss=healthy.loss(model, data[0]).detach())


if __name__ == "__main__":
    main(parser.parse_args())
