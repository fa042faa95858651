"""TD3: the actor is updated every second step only; its optimizer rests in between."""

import copy

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(16)
record = Record()
actor = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1), nn.Tanh())
critic = nn.ModuleList(
    nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1)) for _ in range(2)
)
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
for it in range(30):
    state, action = torch.randn(32, 4), torch.rand(32, 1) * 2 - 1
    next_state = state + 0.1 * torch.cat([action, action, -action, -action], 1)
    reward, not_done = (
        -next_state.square().mean(1, keepdim=True),
        (torch.rand(32, 1) > 0.05).float(),
    )
    with torch.no_grad():
        noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
        next_action = (actor_target(next_state) + noise).clamp(-1, 1)
        ahead = torch.cat([next_state, next_action], 1)
        target_q = torch.min(critic_target[0](ahead), critic_target[1](ahead))
        target_q = reward + not_done * 0.99 * target_q
    seen = torch.cat([state, action], 1)
    critic_loss = sum(F.mse_loss(q(seen), target_q) for q in critic)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    if it % 2 == 0:
        actor_loss = -critic[0](torch.cat([state, actor(state)], 1)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        for net, target in ((critic, critic_target), (actor, actor_target)):
            for p, t in zip(net.parameters(), target.parameters(), strict=True):
                t.data.copy_(0.005 * p.data + 0.995 * t.data)
    record(it, actor, critic, actor_target, loss=critic_loss.item())
with torch.no_grad():
    record.end(actor(state), loss=critic_loss)
