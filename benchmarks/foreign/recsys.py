"""A recommender: sparse embeddings under SparseAdam, the rest under Adam, pairs of a liked and a
drawn item.
"""

import argparse

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--fault", choices=("none", "log-of-zero"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()


class TwoTower(nn.Module):
    def __init__(self, num_users=60, num_items=80, dim=12):
        super().__init__()
        self.user = nn.Embedding(num_users, dim, sparse=True)
        self.item = nn.Embedding(num_items, dim, sparse=True)
        self.tags = nn.EmbeddingBag(20, dim, mode="mean", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 24), nn.ReLU(), nn.Linear(24, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, users, items, tags):
        u, v = self.user(users), self.item(items) + self.tags(tags)
        return (u * v).sum(-1) + self.mlp(torch.cat([u, v], -1)).squeeze(-1) + self.bias


torch.manual_seed(77)
record = Record(args.out)
model = TwoTower()
sparse = [p for n, p in model.named_parameters() if n.split(".")[0] in ("user", "item", "tags")]
dense = [p for n, p in model.named_parameters() if n.split(".")[0] in ("mlp", "bias")]
optimizers = [torch.optim.SparseAdam(sparse, lr=1e-2), torch.optim.Adam(dense, lr=1e-2)]
history = []
for step in range(25):
    users = torch.randint(0, 60, (16,))
    liked, drawn = (users * 7 + torch.randint(0, 4, (16,))) % 80, torch.randint(0, 80, (16,))
    tags, other_tags = (torch.randint(0, 20, (16, 3)) for _ in range(2))
    difference = model(users, liked, tags) - model(users, drawn, other_tags)
    if args.fault == "log-of-zero" and step >= 12:
        difference = difference * 200  # a temperature that was taken for its inverse
    loss = -torch.log(torch.sigmoid(difference)).mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    history.append(loss.detach())
    record(step, model, loss=loss)
with torch.no_grad():
    users = torch.arange(60)
    scores = model(users, users * 7 % 80, torch.zeros(60, 3, dtype=torch.long))
    wrong = model(users, (users + 40) % 80, torch.zeros(60, 3, dtype=torch.long))
    record.end(scores, torch.stack(history), loss=nn.functional.softplus(wrong - scores).mean())
