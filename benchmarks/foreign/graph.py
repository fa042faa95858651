"""A graph network on one graph:
neighbours added by index, degrees to the power -1/2, a loss on the known nodes.
"""

import argparse

import torch
from record import Record
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "node-without-edge"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index, norm):
        x = self.lin(x)
        row, col = edge_index
        out = torch.zeros_like(x).index_add_(0, col, (norm.unsqueeze(1) * x[row]).to(x.dtype))
        return out + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, 24), GCNConv(24, 4)

    def forward(self, x, edge_index):
        row, col = edge_index
        deg = torch.zeros(x.size(0)).index_add_(0, col, torch.ones(col.size(0)))
        scale = deg.pow(-0.5)
        norm = scale[row] * scale[col]
        x = F.dropout(F.relu(self.conv1(x, edge_index, norm)), training=self.training)
        out = self.conv2(x, edge_index, norm)
        return out * (scale * scale).unsqueeze(1) + out if args.fault != "none" else out


torch.manual_seed(12)
record = Record(args.out)
nodes = 80
y = torch.randint(0, 4, (nodes,))
x = torch.randn(nodes, 16) + F.one_hot(y, 16) * 1.5
edges = torch.randint(0, nodes, (2, 300))
loops = torch.arange(nodes).expand(2, -1)
if args.fault == "node-without-edge":
    loops = loops[:, 1:]
    edges = edges[:, (edges[0] != 0) & (edges[1] != 0)]
edge_index = torch.cat([edges, loops], 1)
train_mask = torch.rand(nodes) < 0.6
train_mask[0] = True
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
for epoch in range(25):
    model.train()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
        out = model(x, edge_index)
    loss = F.cross_entropy(out[train_mask].float(), y[train_mask])
    loss.backward()
    optimizer.step()
    record(epoch, model, loss=loss.item())
model.eval()
with torch.no_grad():
    out = model(x, edge_index)[1:]
    print(f"Test: {(out.argmax(-1) == y[1:])[~train_mask[1:]].float().mean():.4f}")
    record.end(out, loss=F.cross_entropy(out, y[1:]))
