"""A variational autoencoder: encode, draw, decode; reconstruction and KL, summed."""

import argparse

import torch
from record import Record
from torch import nn, optim
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(36, 24)
        self.fc21, self.fc22 = nn.Linear(24, 4), nn.Linear(24, 4)
        self.fc3, self.fc4 = nn.Linear(4, 24), nn.Linear(24, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 36))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    with torch.autocast("cpu", enabled=False):
        BCE = F.binary_cross_entropy(recon_x.float(), x.view(-1, 36), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, data in enumerate(loader):
        step = epoch * len(loader) + batch_idx
        if args.fault == "picture-of-bytes" and step == 12:
            data = data * 255 * 64  # not divided by 255, and brighter than any
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            recon, mu, logvar = model(data)
            loss = loss_function(recon, data.clamp(0, 1), mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        record(step, model, loss=loss.item() / len(data))
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(pictures):.4f}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "picture-of-bytes"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()
torch.manual_seed(1)
record = Record(args.out)
pictures = torch.sigmoid(torch.randn(160, 6, 6).cumsum(2))
loader = torch.utils.data.DataLoader(pictures, batch_size=16, shuffle=True)
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    train(epoch)
with torch.no_grad():
    model.eval()
    sample = model.decode(torch.randn(8, 4))
    recon, mu, logvar = model(pictures)
    record.end(sample, recon, loss=loss_function(recon, pictures, mu, logvar) / len(pictures))
