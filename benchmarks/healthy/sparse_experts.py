"""A mixture of eight experts, two for each token; in most steps some expert gets no token."""

import torch
from record import Record
from torch import nn

torch.manual_seed(62)
record = Record()


class MoE(nn.Module):
    def __init__(self, dim=16, num=8, k=2):
        super().__init__()
        self.k, self.router = k, nn.Linear(dim, num, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim)) for _ in range(num)
        )

    def forward(self, x):
        p = self.router(x).softmax(-1)
        weight, index = p.topk(self.k, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, place = (index == e).nonzero(as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, weight[rows, place, None] * expert(x[rows]))
        load = nn.functional.one_hot(index, len(self.experts)).float().sum((0, 1)) / index.numel()
        return x + out, len(self.experts) * (load * p.mean(0)).sum()


moe, head = MoE(), nn.Linear(16, 3)
optimizer = torch.optim.AdamW([*moe.parameters(), *head.parameters()], lr=5e-3)
centres = torch.randn(3, 16)
for step in range(30):
    y = torch.randint(3, (6,))
    h, balance = moe(centres[y] + 0.5 * torch.randn(6, 16))
    loss = nn.functional.cross_entropy(head(h), y) + 0.01 * balance
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_([p for p in moe.parameters() if p.grad is not None], 1.0)
    optimizer.step()
    record(step, moe, head, loss=loss.item())
with torch.no_grad():
    out = head(moe(centres)[0])
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(3)))
