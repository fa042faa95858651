"""Graph attention by scatter over edges; a few nodes have labels, the others none."""

import torch
from record import Record
from torch import nn

torch.manual_seed(35)
record = Record()
N = 60
y = torch.randint(3, (N,))
same = y[:, None] == y[None]
adjacency = torch.rand(N, N) < torch.where(same, 0.2, 0.02)
source, target = torch.cat([adjacency.nonzero(), torch.arange(N)[:, None].expand(-1, 2)]).T
x = torch.randn(N, 8) + 0.5 * nn.functional.one_hot(y, 8)
labelled = torch.zeros(N, dtype=torch.bool)
labelled[:12] = True


class GAT(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o, bias=False)
        self.a = nn.Parameter(torch.randn(2, o) * 0.3)

    def forward(self, x):
        h = self.lin(x)
        e = nn.functional.leaky_relu((h @ self.a[0])[source] + (h @ self.a[1])[target], 0.2)
        top = torch.full((N,), -float("inf")).scatter_reduce(0, target, e, "amax")
        w = (e - top.detach()[target]).exp()
        total = torch.zeros(N).index_add(0, target, w)
        return torch.zeros_like(h).index_add(0, target, (w / total[target])[:, None] * h[source])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = GAT(8, 16), GAT(16, 3)

    def forward(self, x):
        x = nn.functional.dropout(x, 0.4, self.training)
        return self.two(nn.functional.elu(self.one(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(40):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x)[labelled], y[labelled])
    loss.backward()
    optimizer.step()
    record(epoch, model, loss=loss.item())
model.eval()
with torch.no_grad():
    out = model(x)
record.end(out, loss=nn.functional.cross_entropy(out[~labelled], y[~labelled]))
