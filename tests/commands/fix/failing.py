"""Scripts that fail in one line or by one argument, as strangers write them."""

from e2e.scripts import HEAD

LOOP = """
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = objective(step)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("losses", losses)
finish(net)
"""

NET = """
net = nn.Linear(6, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
"""

SAMPLES = """
def objective(step):
    x = torch.randn(5, 6)
"""
OUTLIER = (
    SAMPLES
    + """\
    if step == 2:
        x[1] *= 3000
"""
)

ENTROPY = (
    NET
    + OUTLIER
    + """\
    p = torch.softmax(net(x), -1)
    return -(torch.full_like(p, 0.25) * torch.log(p)).sum(-1).mean()
"""
)

SURE = (
    NET
    + OUTLIER
    + """\
    score = torch.sigmoid(net(x))
    return -(0.5 * torch.log(score) + 0.5 * torch.log(1 - score)).mean()
"""
)

PARTITION = (
    NET
    + OUTLIER
    + """\
    scores = net(x)
    return (torch.log(torch.exp(scores).sum(-1)) - scores[:, 0]).mean()
"""
)

COUNT = (
    NET
    + SAMPLES
    + """\
    keep = torch.ones(5, 4) if step != 2 else torch.zeros(5, 4)
    per_token = net(x).square()
    return (per_token * keep).sum() / keep.sum()
"""
)

UNIT = (
    NET
    + SAMPLES
    + """\
    hidden = torch.relu(net(x) - (100 if step == 2 else 0))
    unit = hidden / hidden.sum(-1, keepdim=True)
    return unit.square().sum()
"""
)

ROOT = (
    NET
    + SAMPLES
    + """\
    distance = torch.sqrt((net(x) - net(x if step == 2 else x + 1)).square().sum(-1))
    return distance.mean()
"""
)

TAUGHT = (
    NET
    + "teacher = nn.Linear(6, 4)\n"
    + OUTLIER
    + """\
    with torch.no_grad():
        p = torch.softmax(teacher(x), -1)
    q = torch.softmax(net(x), -1)
    return (p * (p.log() - q.log())).sum(-1).mean()
"""
)

SCRIPTS = {
    "entropy": HEAD + ENTROPY + LOOP,
    "sure": HEAD + SURE + LOOP,
    "partition": HEAD + PARTITION + LOOP,
    "count": HEAD + COUNT + LOOP,
    "unit": HEAD + UNIT + LOOP,
    "root": HEAD + ROOT + LOOP,
    "taught": HEAD + TAUGHT + LOOP,
}
