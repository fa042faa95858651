"""Actor-critic: actions drawn in a small world, log-probabilities and values kept over an
episode, one update for it.
"""

import argparse
import random

import torch
from record import Record
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--fault", choices=("none", "episode-of-one-step"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()
torch.manual_seed(543)
random.seed(543)
record = Record(args.out)


class World:
    """A point on a line that is to stay near zero."""

    def reset(self):
        self.state = [random.uniform(-0.2, 0.2), random.uniform(-0.1, 0.1)]
        return list(self.state)

    def step(self, action):
        place, speed = self.state
        speed += 0.1 * (1 if action == 1 else -1) + random.gauss(0, 0.02)
        self.state = [place + 0.2 * speed, speed]
        return list(self.state), 1.0 - abs(self.state[0]), abs(self.state[0]) > 0.6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 32)
        self.action_head, self.value_head = nn.Linear(32, 2), nn.Linear(32, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model, env = Policy(), World()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
eps = 0.0 if args.fault == "episode-of-one-step" else 1e-8


def select_action(state):
    probs, value = model(torch.tensor(state))
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append((m.log_prob(action), value))
    return action.item()


def finish_episode():
    R, returns, policy_losses, value_losses = 0.0, [], [], []
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std(unbiased=len(returns) > 1) + eps)
    for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
        policy_losses.append(-log_prob * (R - value.item()))
        value_losses.append(F.smooth_l1_loss(value, R.view(1)))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:], model.saved_actions[:]
    return loss.item()


running_reward = 10.0
for episode in range(25):
    state, total = env.reset(), 0.0
    for _ in range(1 if args.fault == "episode-of-one-step" and episode == 10 else 16):
        state, reward, done = env.step(select_action(state))
        model.rewards.append(reward)
        total += reward
        if done:
            break
    running_reward = 0.05 * total + 0.95 * running_reward
    record(episode, model, loss=finish_episode())
probs, value = model(torch.tensor([0.1, 0.1]))
record.end(probs, value, loss=F.smooth_l1_loss(value, torch.zeros(1)))
