"""Raw loops as strangers write them, under ``nanstop run``: healthy ones untouched, failing ones
caught and named.
"""

import linecache
from dataclasses import dataclass

import pytest

from e2e.scripts import HEAD, run

LOOP = """
for step in range(6):
    optimizer.zero_grad()
    loss = objective(step)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
finish(net)
"""

CLIP = """
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, y):
        u, v = self.left(x), self.right(y)
        u = u / u.norm(dim=-1, keepdim=True)
        v = v / v.norm(dim=-1, keepdim=True)
        return u @ v.T * self.temperature.exp()

net = Towers()
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

def objective(step):
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    if BAD and step == 3:
        x[2] = 0
    logits, target = net(x, y), torch.arange(6)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
"""

VAE = """
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.randn_like(mean)
        return self.decoder(mean + noise * torch.exp(0.5 * log_variance)), mean, log_variance

net = Vae()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)

def objective(step):
    x = torch.randn(5, 8)
    if BAD and step == 3:
        x[1] *= 3000
    made, mean, log_variance = net(x)
    return F.mse_loss(made, x) - (1 + log_variance - mean**2 - log_variance.exp()).mean() / 2
"""

COMPILED = """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.inner(x)
        return self.head(hidden / hidden.abs().sum(-1, keepdim=True))

net = Scale()
compiled = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), 1e-2)

def objective(step):
    x = torch.randn(4, 8)
    if BAD and step == 3:
        x[1] = 0
    return compiled(x).square().mean()
"""

IGNORED = """
net = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

def objective(step):
    words = torch.randint(0, 32, (3, 6))
    ids, labels = words[:, :-1], words[:, 1:].clone()
    labels[:, :2] = -100
    if BAD and step == 3:
        labels[:] = -100
    return F.cross_entropy(net(ids).flatten(0, 1), labels.flatten())
"""

FUNCTION = """
class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs().sqrt()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 0.5 / x.abs().sqrt()

net = nn.Linear(4, 4, bias=False)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)

def objective(step):
    x = torch.randn(4, 4)
    if BAD and step == 3:
        x[2] = 0
    return Root.apply(net(x)).mean()
"""

PENALTY = """
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)

def objective(step):
    x = torch.randn(5, 6, requires_grad=True)
    score = net(x) * (0 if BAD and step == 3 else 1)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + (slope.square().sum(1).sqrt() - 1).square().mean()
"""

AVERAGED = """
import copy

net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))
slow = copy.deepcopy(net)
swa = torch.optim.swa_utils.AveragedModel(net)
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

def objective(step):
    if step:
        schedule.step()
        swa.update_parameters(net)
    with torch.no_grad():
        for kept, new in zip(slow.parameters(), net.parameters()):
            kept.lerp_(new, 0.1)
        net.eval()
        print(F.mse_loss(net(torch.full((4, 6), 3.0)), torch.zeros(4, 1)).item())
        net.train()
    x, y = torch.randn(8, 6), torch.randn(8, 1)
    if BAD and step == 3:
        x[2] = float("inf")
    return F.mse_loss(net(x), y)
"""

SCALED = """
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x))

net = Gated()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(6):
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    if BAD and step == 3:
        x = x * 600
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
finish(net)
"""

TRAINER = """
class Trainer:
    def __init__(self, model, optimizer, every):
        self.model, self.optimizer, self.every = model, optimizer, every

    def training_step(self, batch):
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def fit(self, data):
        for place, batch in enumerate(data):
            (self.training_step(batch) / self.every).backward()
            if (place + 1) % self.every == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()

class Scale(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True, unbiased=False).sqrt()

net = nn.Sequential(nn.Linear(8, 8, bias=False), Scale(), nn.Linear(8, 1))
data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(18)]
if BAD:
    data[10][0][2] = 0
Trainer(net, torch.optim.SGD(net.parameters(), 1e-2), 3).fit(data)
finish(net)
"""

CLOSURE = """
net = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
x, y = torch.randn(16, 4), torch.randn(16, 1)
for step in range(6):
    def closure():
        optimizer.zero_grad()
        out = net(x)
        if BAD and step == 3:
            out = torch.log(out - out)
        loss = F.mse_loss(out, y)
        loss.backward()
        return loss
    print(step, float(optimizer.step(closure)))
finish(net)
"""


@dataclass(frozen=True)
class Truth:
    """A script, and what is planted at its step 3."""

    body: str
    code: str
    op: str
    line: str
    phase: str = "forward"
    module: str | None = None
    micro: int = 0
    action: str = "skip"


TRUTHS = {
    "contrastive": Truth(CLIP + LOOP, "NS206", "aten.div.Tensor", "u = u / u.norm("),
    "vae": Truth(VAE + LOOP, "NS207", "aten.exp.default", "return self.decoder("),
    "compiled": Truth(COMPILED + LOOP, "NS206", "aten.div.Tensor", "return self.head(hidden /"),
    "ignored": Truth(
        IGNORED + LOOP,
        "NS503",
        "aten.nll_loss_forward.default",
        "return F.cross",
        "loss",
        action="continue",  # the gradients of no label are 0
    ),
    "function": Truth(FUNCTION + LOOP, "NS304", "aten.div.Tensor", "return grad * 0.5", "backward"),
    "penalty": Truth(PENALTY + LOOP, "NS304", "aten.div.Tensor", "return score.mean()", "backward"),
    "averaged": Truth(AVERAGED + LOOP, "NS501", "aten.addmm.default", "return F.mse", module="0"),
    "scaled": Truth(SCALED, "NS201", "aten.mul.Tensor", "return self.down(", action="redo"),
    "trainer": Truth(
        TRAINER, "NS206", "aten.div.Tensor", "return (x - x.mean", module="1", micro=1
    ),
    "closure": Truth(CLOSURE, "NS207", "aten.log.default", "out = torch.log(", "loss"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUTHS)
def test_a_healthy_script_is_its_own(tmp_path, name):
    (tmp_path / "script.py").write_text(HEAD + TRUTHS[name].body)
    alone = run(tmp_path, "script.py", watched=False)
    watched = run(tmp_path, "script.py", options=("--quiet",))
    assert (watched.code, watched.out, watched.err) == (0, alone.out, alone.err)
    assert watched.out.endswith(b"finite True\n")
    assert (watched.rows, watched.summary["findings"]) == ([], [])
    assert (watched.summary["exit"], watched.summary["steps"]) == (0, 6)
    assert watched.summary["seconds"] > 0
    assert [p.name for p in (tmp_path / "incidents").iterdir()] == ["summary.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUTHS)
def test_a_failure_is_caught_named_and_kept_from_the_weights(tmp_path, name):
    truth, script = TRUTHS[name], tmp_path / "script.py"
    script.write_text(HEAD + truth.body)
    ended = run(tmp_path, "script.py", "bad")
    assert ended.code == 0, ended.err
    assert ended.out.endswith(b"finite True\n")
    (row,) = ended.rows
    found = {key: row[key] for key in ("code", "op", "phase", "module", "step", "micro", "action")}
    assert found == {
        "code": truth.code,
        "op": truth.op,
        "phase": truth.phase,
        "module": truth.module,
        "step": 3,
        "micro": truth.micro,
        "action": truth.action,
    }
    file, line = row["source"].rsplit(":", 1)
    assert linecache.getline(file, int(line)).strip().startswith(truth.line)
    assert (row["count"], row["rank"]) == (1, 0)
    assert f"error[{truth.code}]" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_what_looks_bad_and_is_not(tmp_path):
    """A frozen NaN that nothing reads, NaN in rows that are masked out, a loss of 0, a scaler's
    first skips.
    """
    (tmp_path / "script.py").write_text(
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.full((3,), float("nan")), requires_grad=False)
        self.register_buffer("placeholder", torch.full((2,), float("inf")))

    def forward(self, x, mask):
        scores = (x @ x.mT).masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        return torch.where(mask[..., None], self.inner(scores @ x), torch.tensor(float("nan")))

net = Net()
optimizer = torch.optim.AdamW(net.inner.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
for step in range(30):
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:] = False
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(x, mask)[mask].float().square().mean() * (step != 25)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item(), scaler.get_scale())
finish(net.inner)
"""
    )
    alone, watched = run(tmp_path, "script.py", watched=False), run(tmp_path, "script.py")
    assert (watched.code, watched.out, watched.rows) == (0, alone.out, [])
    assert b"25 0.0" in watched.out


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["repair", "skip"])
def test_an_infinite_loss_of_finite_gradients_costs_no_update(tmp_path, on_failure):
    """Smoothed labels give entries that are masked by -Inf a share of the loss, and no gradient."""
    (tmp_path / "script.py").write_text(
        HEAD
        + """
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
mask = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -torch.inf])
for step in range(40):
    x = torch.randn(16, 8)
    loss = criterion(net(x) + mask, x[:, :5].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(net)
"""
    )
    alone = run(tmp_path, "script.py", watched=False)
    watched = run(tmp_path, "script.py", options=("--on-failure", on_failure))
    assert (watched.code, watched.out) == (0, alone.out)
    (row,) = watched.rows
    assert (row["action"], row["count"], row["step"]) == ("continue", 40, 0)
    assert "only the loss is not: the update is applied" in watched.err
