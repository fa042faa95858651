"""On a GPU backward runs in the engine's own threads:
places, phases and localization hold there too.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fnstep import FnStep
from nanstop.localize.localize import localize
from nanstop.tracing.recorder import Recorder

pytestmark = pytest.mark.gpu
HIDDEN = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        q, k, v = (
            t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, reentrant=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.embed = nn.Embedding(96, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, 96, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else self.again(block, x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())

    def again(self, block, x):
        return checkpoint(block, x, use_reentrant=self.reentrant)


def batch():
    ids = torch.randint(0, 96, (3, 24), generator=torch.Generator().manual_seed(0)).cuda()
    return {"input_ids": ids, "labels": ids.clone()}


def located(model):
    return localize(FnStep(model, lambda m, b: m(**b), [batch()]), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_ops_are_placed(reentrant, dtype):
    model = Model(reentrant).cuda().to(dtype)
    for _ in range(
        2
    ):  # the second run meets sequence numbers of the engine's threads beside the main one's
        model.zero_grad()
        recorder = Recorder(model, dict(model.named_parameters()))
        with recorder:
            model(**batch()).backward()
        trace = recorder.finish()
        for op in trace.ops:
            for value in op.inputs:
                if op.phase == "backward" and op.name == "aten.mm.default" and value.storage.name:
                    assert op.module == value.storage.name.rpartition(".")[0]
        for name, parameter in model.named_parameters():
            (value,) = recorder.values(parameter.grad)
            assert trace.ops[value.storage.writers[0]].module == name.rpartition(".")[0]
    again = [op for op in trace.ops if op.phase == "recompute"]
    assert bool(again) == (reentrant is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_healthy_model_is_silent(reentrant, dtype):
    assert located(Model(reentrant).cuda().to(dtype)) is None


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_half_overflow(reentrant):
    model = Model(reentrant).cuda()
    model.blocks[1].up.weight.data.mul_(3e3)
    model.blocks[1].gate.weight.data.mul_(3e3)
    found = located(model.half())
    assert (found.key.op, found.key.module) == ("aten.mul.Tensor", "blocks.1")
    assert (found.key.phase, found.first_bad.wider) == ("forward", "finite")
    assert found.positions
    assert found.first_bad.outputs[0].device == "cuda"


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_birth(reentrant):
    class RootAtZero(nn.Module):
        def forward(self, x):
            return x + (x - x).abs().sqrt()

    model = Model(reentrant).cuda()
    model.blocks[1].norm = nn.Sequential(model.blocks[1].norm, RootAtZero())
    found = located(model)
    assert (found.key.phase, found.key.module) == ("backward", "blocks.1.norm.1")
    assert found.first_bad.forward_op == "aten.sqrt.default"
    assert found.first_bad.source.text == "return x + (x - x).abs().sqrt()"


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_update_that_breaks_a_weight(options):
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    model(**batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = model.blocks[1].up.weight
    optimizer.state[weight]["exp_avg_sq"].fill_(-1.0)
    found = localize(FnStep(model, lambda m, b: m(**b), [batch()], optimizer), 0, update=True)
    assert (found.key.phase, found.culprit) == ("optimizer", "blocks.1.up.weight")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_recording_does_not_synchronise_until_it_is_read():
    model = Model().cuda()
    recorder = Recorder(model, dict(model.named_parameters()))
    data = batch()
    model(**data).backward()
    model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with recorder:
            model(**data).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(recorder.finish().ops) > 50
