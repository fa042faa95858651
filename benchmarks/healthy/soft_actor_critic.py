"""SAC: twin critics, a squashed policy, a temperature of its own optimizer, Polyak targets."""

import copy

import torch
from record import Record
from torch import nn

torch.manual_seed(15)
record = Record()


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, o))


actor, q1, q2 = mlp(3, 2), mlp(4, 1), mlp(4, 1)
q1_target, q2_target = (
    copy.deepcopy(q1).requires_grad_(False),
    copy.deepcopy(q2).requires_grad_(False),
)
log_alpha = torch.zeros(1, requires_grad=True)
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
alpha_opt = torch.optim.Adam([log_alpha], lr=1e-3)


def sample(s):
    mean, log_std = actor(s).chunk(2, dim=-1)
    log_std = log_std.clamp(-5, 2)
    z = mean + log_std.exp() * torch.randn_like(mean)
    a = z.tanh()
    logp = torch.distributions.Normal(mean, log_std.exp()).log_prob(z)
    logp = logp - 2 * (0.6931 - z - nn.functional.softplus(-2 * z))
    return a, logp.sum(-1, keepdim=True)


for step in range(25):
    s = torch.randn(32, 3)
    a = torch.rand(32, 1) * 2 - 1
    r = -(a - s[:, :1].tanh()).abs()
    s2 = 0.9 * s + 0.1 * torch.randn(32, 3)
    with torch.no_grad():
        a2, logp2 = sample(s2)
        sa2 = torch.cat([s2, a2], -1)
        y = r + 0.9 * (torch.min(q1_target(sa2), q2_target(sa2)) - log_alpha.exp() * logp2)
    sa = torch.cat([s, a], -1)
    critic_loss = (q1(sa) - y).square().mean() + (q2(sa) - y).square().mean()
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()

    new, logp = sample(s)
    snew = torch.cat([s, new], -1)
    actor_loss = (log_alpha.exp().detach() * logp - torch.min(q1(snew), q2(snew))).mean()
    actor_opt.zero_grad()
    actor_loss.backward()  # leaves gradients in the critics, which are cleared above
    actor_opt.step()

    alpha_loss = -(log_alpha * (logp.detach() - 1.0)).mean()
    alpha_opt.zero_grad()
    alpha_loss.backward()
    alpha_opt.step()
    with torch.no_grad():
        for q, t in ((q1, q1_target), (q2, q2_target)):
            for p, pt in zip(q.parameters(), t.parameters(), strict=True):
                pt.mul_(0.995).add_(0.005 * p)
    record(step, actor, q1, q2, q1_target, loss=critic_loss.item())
s = torch.randn(16, 3)
with torch.no_grad():
    record.end(actor(s), loss=(actor(s)[:, :1].tanh() - s[:, :1].tanh()).square().mean())
