"""A constrained classifier: the loss falls over the weights, and climbs over a multiplier."""

import torch
from record import Record
from torch import nn

torch.manual_seed(105)
record = Record()
net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))
multiplier = nn.Parameter(torch.zeros(()))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
dual = torch.optim.SGD([multiplier], lr=0.5, maximize=True)
direction = torch.randn(10)
for step in range(40):
    x = torch.randn(64, 10)
    group = x[:, 0] > 0
    y = (x @ direction + 0.5 * group > 0).float()
    logits = net(x).squeeze(1)
    rates = [torch.sigmoid(logits[chosen]).mean() for chosen in (group, ~group)]
    violated = (rates[0] - rates[1]).abs() - 0.05
    loss = nn.functional.binary_cross_entropy_with_logits(logits, y) + multiplier * violated
    optimizer.zero_grad()
    dual.zero_grad()
    loss.backward()
    optimizer.step()
    dual.step()
    with torch.no_grad():
        multiplier.clamp_(min=0.0)  # a constraint that holds presses no further
    record(step, net, loss=loss.item())
net.eval()
with torch.no_grad():
    record.end(net(x), multiplier, loss=loss)
