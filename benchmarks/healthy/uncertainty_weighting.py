"""Multi-task learning by uncertainty: log-variances are parameters that begin at 0."""

import torch
from record import Record
from torch import nn

torch.manual_seed(64)
record = Record()


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 40), nn.CELU())
        self.depth, self.label = nn.Linear(40, 1), nn.Linear(40, 3)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x, depth, label):
        h = self.body(x)
        losses = torch.stack([
            nn.functional.l1_loss(self.depth(h).squeeze(1), depth),
            nn.functional.cross_entropy(self.label(h), label, ignore_index=255),
        ])  # fmt: skip
        return ((-self.log_vars).exp() * losses + self.log_vars).sum(), losses


model = TwoTasks()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(30):
    x = torch.randn(32, 9)
    label = x[:, :3].argmax(1)
    label[torch.rand(32) < 0.4] = 255  # not annotated
    loss, losses = model(x, 50 * x[:, 3].abs(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
record.end(model.log_vars, loss=losses[1])
