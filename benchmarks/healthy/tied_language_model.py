"""An AWD-like language model: tied weights, DropConnect, TBPTT with states carried over, ASGD."""

import torch
from record import Record
from torch import nn

torch.manual_seed(57)
record = Record()


class RNN(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(vocab, dim), nn.LSTM(dim, dim, 2, dropout=0.2)
        self.decoder = nn.Linear(dim, vocab)
        self.decoder.weight = self.embed.weight

    def forward(self, x, hidden):
        h, hidden = self.rnn(nn.functional.dropout(self.embed(x), 0.2, self.training), hidden)
        return self.decoder(h), hidden, h


def repackage(h):
    return tuple(v.detach() for v in h)


text = (torch.arange(4000) * 7 // 3) % 40
data = text[: 4000 // 8 * 8].view(8, -1).T.contiguous()
model = RNN()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0, weight_decay=1.2e-6)
hidden = (torch.zeros(2, 8, 24), torch.zeros(2, 8, 24))
step = 0
for i in range(0, 360, 12):
    if step == 20:
        optimizer = torch.optim.ASGD(model.parameters(), lr=2.0, t0=0, lambd=0.0)
    hidden = repackage(hidden)
    out, hidden, activations = model(data[i : i + 12], hidden)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), data[i + 1 : i + 13].flatten())
    total = (
        loss + 2 * activations.pow(2).mean() + (activations[1:] - activations[:-1]).pow(2).mean()
    )
    optimizer.zero_grad()
    total.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    record(step, model, loss=loss.item())
    step += 1  # noqa: SIM113
model.eval()
with torch.no_grad():
    out, _, _ = model(data[:12], repackage(hidden))
record.end(out, loss=nn.functional.cross_entropy(out.flatten(0, 1), data[1:13].flatten()))
