"""Training in the manner of JAX: parameters in a dict, grad_and_value, no optimizer, no .grad."""

import torch
from record import Record
from torch import nn
from torch.func import functional_call, grad_and_value

torch.manual_seed(78)
record = Record()
net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1))
params = {k: v.detach() for k, v in net.named_parameters()}
velocity = {k: torch.zeros_like(v) for k, v in params.items()}


@grad_and_value
def loss_fn(params, x, y):
    return nn.functional.mse_loss(functional_call(net, params, (x,)), y)


for step in range(40):
    x = torch.randn(32, 6)
    grads, loss = loss_fn(params, x, x[:, :2].prod(1, keepdim=True))
    velocity = {k: 0.9 * velocity[k] + grads[k] for k in params}
    params = {k: params[k] - 0.02 * velocity[k] for k in params}
    record(step, net, loss=loss.item())
net.load_state_dict(params)
with torch.no_grad():
    record.end(net(x), loss=loss)
