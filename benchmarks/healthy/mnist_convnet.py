"""The convolutional net of torch's own example: dropout, log-softmax, Adadelta, StepLR."""

import torch
import torch.nn.functional as F
from record import Record
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(256, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


torch.manual_seed(1)
record = Record()
target = torch.randint(10, (320,))
data = torch.randn(320, 1, 12, 12) * 0.3 + torch.randn(10, 1, 12, 12)[target]
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(data, target), batch_size=16, shuffle=True
)
model = Net()
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
step = 0
for epoch in range(2):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        record(step, model, loss=loss.item())
        step += 1
    scheduler.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    print(f"epoch {epoch}: {correct}/320")
with torch.no_grad():
    output = model(data)
record.end(output, loss=F.nll_loss(output, target))
