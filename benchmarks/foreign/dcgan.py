"""DCGAN: the discriminator on real and on fake images, then the generator through it, with
BatchNorm in both.
"""

import argparse

import torch
from record import Record
from torch import nn, optim

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "log-of-zero"), default="none")
parser.add_argument("--out", default="left.jsonl")
opt = parser.parse_args()

torch.manual_seed(999)
record = Record(opt.out)
nz, ngf, batch = 8, 8, 8
amp = torch.autocast("cpu", dtype=torch.bfloat16, enabled=opt.dtype == "bf16")


def weights_init(m):
    if "Conv" in type(m).__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in type(m).__name__:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
    nn.BatchNorm2d(ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, ngf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ngf, ngf * 2, 3, 1, 1, bias=False),
    nn.BatchNorm2d(ngf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ngf * 2, 1, 4, 1, 0, bias=False),
)
netG.apply(weights_init)
netD.apply(weights_init)


def criterion(output, label):
    output = output.float()
    if opt.fault == "log-of-zero" and step == 9:
        output = output * 3e4  # a discriminator that is sure
        p = torch.sigmoid(output)
        return -(label * torch.log(p) + (1 - label) * torch.log(1 - p)).mean()
    return nn.functional.binary_cross_entropy_with_logits(output, label)


images = torch.tanh(torch.randn(24 * batch, 1, 8, 8).cumsum(-1) * 0.3)
loader = torch.utils.data.DataLoader(images, batch_size=batch, shuffle=True)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for step, real in enumerate(loader):
    netD.zero_grad()
    label = torch.full((batch,), 1.0)
    with amp:
        errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()
    with amp:
        fake = netG(torch.randn(batch, nz, 1, 1))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    errD = errD_real + errD_fake
    optimizerD.step()

    netG.zero_grad()
    label.fill_(1.0)
    with amp:
        errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    record(step, netG, netD, loss=errD.item() + errG.item())
with torch.no_grad():
    netD.eval()
    fake = netG(torch.randn(batch, nz, 1, 1))
    record.end(fake, netD(fake), loss=criterion(netD(real).view(-1), label))
