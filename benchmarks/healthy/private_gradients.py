"""DP-SGD: gradients per sample by vmap, each clipped, the sum with noise written into .grad."""

import torch
from record import Record
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(76)
record = Record()
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
clip, noise = 1.0, 0.5


def loss_of(params, x, y):
    return nn.functional.cross_entropy(functional_call(model, params, (x[None],)), y[None])


for step in range(25):
    x = torch.randn(32, 8)
    y = (x[:, 0] > 0).long()
    params = {k: p.detach() for k, p in model.named_parameters()}
    grads = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (clip / (norms + 1e-6)).clamp(max=1.0)
    for k, p in model.named_parameters():
        summed = torch.einsum("n,n...->...", factor, grads[k])
        p.grad = (summed + noise * clip * torch.randn_like(summed)) / 32
    optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y)
    record(step, model, loss=loss.item())
record.end(model[0].weight, loss=loss)
