"""REINFORCE with whitened returns; an update at the end of each episode."""

import torch
from record import Record
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(12)
record = Record()
policy = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
eps = torch.finfo(torch.float32).eps


def pole():
    """A stick that falls faster the further it leans; ends when it lies."""
    s = torch.rand(4) * 0.1 - 0.05
    for _ in range(40):
        action = yield s, abs(s[2].item()) < 0.3
        push = 0.1 if action else -0.1
        s = s + torch.tensor([0.02 * s[1], push, 0.1 * s[3], 0.3 * s[2] - 0.6 * push])


for episode in range(25):
    log_probs, rewards = [], []
    game = pole()
    state, alive = next(game)
    while alive:
        chances = Categorical(logits=policy(state))
        action = chances.sample()
        log_probs.append(chances.log_prob(action))
        rewards.append(1.0)
        try:
            state, alive = game.send(action.item())
        except StopIteration:
            break
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    loss = torch.stack([-p * g for p, g in zip(log_probs, returns, strict=True)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(episode, policy, loss=loss.item())
policy.eval()
states = torch.randn(8, 4) * 0.1
with torch.no_grad():
    record.end(policy(states), loss=-len(rewards))
