"""A2C on a grid with rare rewards: one body, two heads, entropy bonus; RMSprop as in the paper."""

import torch
from record import Record
from torch import nn

torch.manual_seed(14)
record = Record()
SIDE = 5


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * SIDE, 32), nn.ReLU())
        self.pi, self.v = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


def encode(at):
    return torch.cat([nn.functional.one_hot(at[:, i], SIDE) for i in (0, 1)], dim=-1).float()


moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
model = ActorCritic()
optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, alpha=0.99, eps=1e-5)
at = torch.zeros(6, 2, dtype=torch.long)
for step in range(40):
    logps, values, rewards, entropies, alive = [], [], [], [], []
    for _ in range(5):
        logits, value = model(encode(at))
        d = torch.distributions.Categorical(logits=logits)
        action = d.sample()
        at = (at + moves[action]).clamp(0, SIDE - 1)
        goal = (at == SIDE - 1).all(1)
        at = at * (~goal[:, None])
        logps.append(d.log_prob(action))
        values.append(value)
        entropies.append(d.entropy())
        rewards.append(goal.float())
        alive.append(1 - goal.float())
    with torch.no_grad():
        ahead = model(encode(at))[1]
    loss = 0.0
    for i in reversed(range(5)):
        ahead = rewards[i] + 0.95 * alive[i] * ahead
        advantage = ahead - values[i]
        loss = loss - (logps[i] * advantage.detach()).mean() + 0.5 * advantage.square().mean()
        loss = loss - 0.01 * entropies[i].mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    logits, value = model(encode(at))
record.end(logits, value, loss=-float(value.mean()))
