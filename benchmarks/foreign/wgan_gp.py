"""WGAN-GP: five steps of the critic under a gradient penalty for each of the generator, which
keeps the graph of its fakes.
"""

import argparse

import torch
from record import Record
from torch import autograd, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "norm-of-zero"), default="none")
parser.add_argument("--out", default="left.jsonl")


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32, 0.8), nn.LeakyReLU(0.2), nn.Linear(32, 16)
        )

    def forward(self, z):
        return torch.tanh(self.model(z))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.model(x)


def compute_gradient_penalty(D, real, fake, *, flat):
    alpha = torch.rand(real.size(0), 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = D(between)
    if flat:
        scores = scores.clamp(1e3, 1e4)  # no slope: the norm below is that of zeros
    gradients = autograd.grad(
        outputs=scores,
        inputs=between,
        grad_outputs=torch.ones_like(scores),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradient_norm = gradients.view(gradients.size(0), -1).square().sum(1).sqrt()
    return ((gradient_norm - 1) ** 2).mean()


def main():
    opt = parser.parse_args()
    torch.manual_seed(3)
    record = Record(opt.out)
    generator, discriminator = Generator(), Discriminator()
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    amp = torch.autocast("cpu", dtype=torch.bfloat16, enabled=opt.dtype == "bf16")
    data = torch.tanh(torch.randn(30, 8, 16) + torch.linspace(-1, 1, 16))
    for i, real in enumerate(data):
        optimizer_D.zero_grad()
        with amp:
            fake = generator(torch.randn(8, 8))
            validity = discriminator(fake.detach()).mean() - discriminator(real).mean()
            flat = opt.fault == "norm-of-zero" and i == 10
            penalty = compute_gradient_penalty(discriminator, real, fake.detach(), flat=flat)
            d_loss = validity + 10 * penalty
        d_loss.backward()
        optimizer_D.step()
        optimizer_G.zero_grad()
        if i % 5 == 0:
            with amp:
                g_loss = -torch.mean(discriminator(fake))
            g_loss.backward()
            optimizer_G.step()
        record(i, generator, discriminator, loss=d_loss.item())
    with torch.no_grad():
        fake = generator.eval()(torch.randn(64, 8))
        far = (fake.mean(0) - data.mean((0, 1))).square().mean()
        record.end(fake, discriminator(fake), loss=far)


if __name__ == "__main__":
    main()
