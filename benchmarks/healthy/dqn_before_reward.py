"""DQN on a chain whose reward is not found in the run: targets and errors are near 0 for long."""

import random
from collections import deque

import torch
from record import Record
from torch import nn

torch.manual_seed(11)
record = Record()
LENGTH = 60


def net():
    return nn.Sequential(nn.Linear(LENGTH, 32), nn.ReLU(), nn.Linear(32, 2))


policy, target = net(), net()
nn.init.zeros_(policy[2].weight)
nn.init.zeros_(policy[2].bias)
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.RMSprop(policy.parameters(), lr=2.5e-4)
memory = deque(maxlen=500)
eye, state = torch.eye(LENGTH), 0
for t in range(200):
    if random.random() < max(0.1, 1 - t / 150):
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = policy(eye[state]).argmax().item()
    following = min(max(state + (1 if action else -1), 0), LENGTH - 1)
    reward = float(following == LENGTH - 1)
    memory.append((state, action, following, reward))
    state = 0 if reward else following
    if t >= 32 and t % 4 == 0:
        s, a, f, r = zip(*random.sample(memory, 16), strict=True)
        q = policy(eye[list(s)]).gather(1, torch.tensor(a)[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = torch.tensor(r) + 0.99 * target(eye[list(f)]).max(1).values
        loss = nn.functional.smooth_l1_loss(q, wanted)
        optimizer.zero_grad()
        loss.backward()
        for p in policy.parameters():
            p.grad.data.clamp_(-1, 1)
        optimizer.step()
        record(t, policy, loss=loss.item())
    if t % 50 == 0:
        target.load_state_dict(policy.state_dict())
with torch.no_grad():
    record.end(policy(eye), loss=policy(eye).square().mean())
