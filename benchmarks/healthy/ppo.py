"""PPO: rollouts, advantages by GAE, epochs of clipped minibatches; the first ratio is 1."""

import torch
from record import Record
from torch import nn
from torch.distributions import Normal

torch.manual_seed(13)
record = Record()


def layer(i, o, std):
    linear = nn.Linear(i, o)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer(3, 32, 1.4), nn.Tanh(), layer(32, 1, 1.0))
        self.actor = nn.Sequential(layer(3, 32, 1.4), nn.Tanh(), layer(32, 1, 0.01))
        self.log_std = nn.Parameter(torch.zeros(1))

    def act(self, s, a=None):
        d = Normal(self.actor(s), self.log_std.exp())
        a = d.sample() if a is None else a
        return a, d.log_prob(a).sum(-1), d.entropy().sum(-1), self.critic(s).squeeze(-1)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
state, step = torch.randn(8, 3), 0
for update in range(5):
    optimizer.param_groups[0]["lr"] = (1 - update / 5) * 3e-3
    kept = []
    with torch.no_grad():
        for _ in range(16):
            a, logp, _, v = agent.act(state)
            reward = -(a.squeeze(-1) - state[:, 0]).square()
            kept.append((state, a, logp, v, reward))
            state = 0.9 * state + 0.3 * torch.randn(8, 3)
        last, gae, advantages = agent.critic(state).squeeze(-1), 0.0, []
        for _, _, _, v, reward in reversed(kept):
            gae = reward + 0.99 * last - v + 0.99 * 0.95 * gae
            last = v
            advantages.insert(0, gae)
    s, a, logp, v, _ = (torch.cat(t) for t in zip(*kept, strict=True))
    adv = torch.cat(advantages)
    returns = adv + v
    for epoch in range(2):
        for index in torch.randperm(128).split(32):
            _, new, entropy, value = agent.act(s[index], a[index])
            ratio = (new - logp[index]).exp()
            m = adv[index]
            m = (m - m.mean()) / (m.std() + 1e-8)
            pg = torch.max(-m * ratio, -m * ratio.clamp(0.8, 1.2)).mean()
            loss = pg + 0.25 * (value - returns[index]).square().mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            record(step, agent, loss=loss.item())
            step += 1
with torch.no_grad():
    record.end(agent.actor(s[:16]), loss=(agent.actor(s).squeeze(-1) - s[:, 0]).square().mean())
