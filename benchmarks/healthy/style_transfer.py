"""Style transfer: the image is what LBFGS trains, the network is frozen."""

import torch
from record import Record
from torch import nn

torch.manual_seed(8)
record = Record()
features = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.Tanh())
features.requires_grad_(False).eval()


def gram(x):
    f = x.flatten(2)
    return f @ f.transpose(1, 2) / f.shape[-1]


content, style = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16).cumsum(-1) / 8
wanted_content, wanted_style = features(content), gram(features(style))
image = content.clone().requires_grad_()
optimizer = torch.optim.LBFGS([image], lr=0.5)
run = [0]
while run[0] < 40:

    def closure():
        with torch.no_grad():
            image.clamp_(0, 1)
        optimizer.zero_grad()
        seen = features(image)
        content_loss = nn.functional.mse_loss(seen, wanted_content)
        loss = content_loss + 50 * nn.functional.mse_loss(gram(seen), wanted_style)
        loss.backward()
        run[0] += 1
        return loss

    loss = optimizer.step(closure)
    record(run[0], features, loss=loss.item())
with torch.no_grad():
    image.clamp_(0, 1)
record.end(image, loss=nn.functional.mse_loss(gram(features(image)), wanted_style))
