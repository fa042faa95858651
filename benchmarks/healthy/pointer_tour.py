"""A pointer network for tours: visited cities at -inf, REINFORCE with a rollout baseline."""

import copy

import torch
from record import Record
from torch import nn

torch.manual_seed(101)
record = Record()


class Pointer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.cell = nn.Linear(2, dim), nn.GRUCell(dim, dim)
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.first = nn.Parameter(torch.randn(dim) * 0.1)

    def forward(self, cities, greedy=False):
        n, num, _ = cities.shape
        h = self.embed(cities)
        state, x = h.mean(1), self.first.expand(n, -1)
        done = torch.zeros(n, num, dtype=torch.bool)
        order, logp = [], 0.0
        for _ in range(num):
            state = self.cell(x, state)
            scores = 10 * torch.tanh((self.key(h) @ self.query(state)[..., None]).squeeze(-1) / 4)
            p = scores.masked_fill(done, -torch.inf).log_softmax(-1)
            at = p.argmax(-1) if greedy else p.exp().multinomial(1).squeeze(1)
            logp = logp + p.gather(1, at[:, None]).squeeze(1)
            done = done.scatter(1, at[:, None], True)
            x = h[torch.arange(n), at]
            order.append(at)
        tour = cities.gather(1, torch.stack(order, 1)[..., None].expand(-1, -1, 2))
        return (tour - tour.roll(1, 1)).norm(dim=-1).sum(1), logp


model = Pointer()
baseline = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(20):
    cities = torch.rand(24, 6, 2)
    length, logp = model(cities)
    with torch.no_grad():
        before, _ = baseline(cities, greedy=True)
    loss = ((length - before) * logp).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 8 == 7:
        baseline.load_state_dict(model.state_dict())
    record(step, model, loss=length.mean().item())
record.end(length, loss=length.mean())
