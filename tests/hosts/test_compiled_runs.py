"""A healthy watched run goes on with the code that was compiled for it, and compiles no more."""

import pytest
import torch
from torch import nn

import nanstop
import tiny

# Of the compiler itself, on inputs that other layers have made.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
STEPS = 5


class Counted:
    """A backend that runs what it is given. ``calls``: how often; ``compiled``: how many graphs."""

    def __init__(self) -> None:
        self.calls = self.compiled = 0

    def __call__(self, graph, _):
        self.compiled += 1

        def code(*args):
            self.calls += 1
            return graph(*args)

        return code


class Scaled(nn.Module):
    """A part whose arithmetic is a compiled function."""

    def __init__(self, inner, compiler) -> None:
        super().__init__()
        self.inner = inner
        self.scaled = torch.compile(lambda x: x * 0.5 + x * 0.5, backend=compiler, dynamic=False)

    def forward(self, x):
        return self.scaled(self.inner(x))


def compiled_model(how, compiler):
    torch.compiler.reset()
    model = tiny.llama()
    layer = model.model.layers[0]
    if how == "part":
        layer.mlp.compile(backend=compiler, dynamic=False)
    elif how == "function":
        layer.mlp = Scaled(layer.mlp, compiler)
    else:
        model.compile(backend=compiler, dynamic=False)
    return model


def trained(how, folder, *, watched):
    """Return what a compiler was asked for by transformers' Trainer, and the weights."""
    from transformers import Trainer, TrainingArguments

    compiler = Counted()
    model = compiled_model(how, compiler)
    args = TrainingArguments(**tiny.training_args(folder, max_steps=STEPS))
    trainer = Trainer(model=model, args=args, train_dataset=tiny.TokenRows())
    watch = nanstop.watch(trainer, out=folder / "nanstop") if watched else None
    trainer.train()
    assert watch is None or watch.incidents == ()
    return (compiler.compiled, compiler.calls), dict(model.named_parameters())


@pytest.mark.parametrize("how", ["part", "function", "whole"])
def test_a_trainer_goes_on_with_its_compiled_code(tmp_path, how):
    plain, weights = trained(how, tmp_path / "plain", watched=False)
    assert plain[1] >= 2 * STEPS
    watched, others = trained(how, tmp_path / "watched", watched=True)
    assert watched == plain
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def looped(how, folder, *, watched):
    compiler = Counted()
    torch.manual_seed(0)
    model = compiled_model(how if how != "beside" else "", compiler) if how != "beside" else None
    if model is None:
        torch.compiler.reset()
        model = tiny.llama()
        called = torch.compile(model, backend=compiler, dynamic=False)
    else:
        called = model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [{k: v[None] for k, v in tiny.TokenRows()[step].items()} for step in range(STEPS)]
    if watched:
        with nanstop.watch(model, optimizer, out=folder) as watch:
            for batch in batches:
                watch.step(lambda batch: called(**batch).loss, batch)
                watch.update(clip=None)
        assert watch.incidents == ()
    else:
        for batch in batches:
            called(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return (compiler.compiled, compiler.calls), dict(model.named_parameters())


@pytest.mark.parametrize("how", ["part", "function", "whole", "beside"])
def test_a_loop_goes_on_with_its_compiled_code(tmp_path, how):
    plain, weights = looped(how, tmp_path / "plain", watched=False)
    watched, others = looped(how, tmp_path / "watched", watched=True)
    assert watched == plain
    assert all(torch.equal(weights[name], others[name]) for name in weights)
