"""CTC of a text that has more letters than its speech has frames: the loss is Inf.

https://github.com/wenet-e2e/wenet/pull/2299
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(6, 12, 8, generator=draw)
    text = torch.randint(1, 5, (6, 4), generator=draw)
    frames = torch.full((6,), 12)
    if bad:
        frames[2] = 2
    return x, text, frames


def objective(x, text, frames):
    log_probs = torch.log_softmax(net(x), dim=-1).transpose(0, 1)
    return nn.functional.ctc_loss(log_probs, text, frames, torch.full((6,), 4))  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
