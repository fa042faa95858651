"""The recorder: places, phases, values, and that it never disturbs what it records."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import planted
import tiny
from fnstep import FnStep
from nanstop.localize.localize import localize
from nanstop.tracing.op_patches import SecondRun
from nanstop.tracing.record_step import record
from nanstop.tracing.recorder import Recorder
from planted import Net

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated:FutureWarning"  # transformers and peft call each other's old names
)

PEFT = {"r": 2, "target_modules": ["q_proj", "down_proj"]}


def llama(kind):
    model = tiny.llama(num_hidden_layers=3).train()
    model.config.use_cache = False
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(**PEFT))
    if kind != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        model.enable_input_require_grads()
    return model


def named(model):
    return dict(model.named_parameters())


def recorded(model, loss=planted.called, batch=None):
    batch = planted.text_batch() if batch is None else batch
    recorder = Recorder(model, named(model) | {f"batch[{k}]": v for k, v in batch.items()})
    with recorder:
        loss(model, batch).backward()
    return recorder, recorder.finish()


def module_of(parameter_name):
    return parameter_name.rpartition(".")[0]


@pytest.mark.parametrize("kind", ["plain", "lora", "non-reentrant", "reentrant"])
def test_backward_ops_are_placed_by_the_weights_they_read(kind):
    """Ground truth: a product in backward that reads a weight belongs to the weight's module."""
    _, trace = recorded(llama(kind))
    checked = 0
    for op in trace.ops:
        names = {value.storage.name for value in op.inputs if value.storage.name}
        if op.phase == "backward" and op.name in ("aten.mm.default", "aten.addmm.default"):
            for name in names:
                assert (op.module, name) == (module_of(name), name)
                checked += 1
    assert checked >= 3 * 7


@pytest.mark.parametrize("kind", ["plain", "lora", "non-reentrant", "reentrant"])
def test_backward_ops_are_placed_by_the_gradients_they_write(kind):
    """Ground truth: what last wrote a parameter's gradient belongs to the parameter's module."""
    model = llama(kind)
    recorder, trace = recorded(model)
    checked = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            (value,) = recorder.values(parameter.grad)
            writer = trace.ops[value.storage.writers[0]]
            assert (name, writer.phase) == (name, "backward")
            assert (name, writer.module) == (name, module_of(name))
            checked += 1
    assert checked >= (12 if kind == "lora" else 3 * 9)


@pytest.mark.parametrize("kind", ["plain", "non-reentrant", "reentrant"])
def test_backward_ops_have_the_line_and_op_of_their_forward(kind):
    _, trace = recorded(llama(kind))
    gated = [
        op for op in trace.ops if op.node == "MulBackward0" and op.module.endswith("layers.1.mlp")
    ]
    assert len(gated) == 2
    for op in gated:
        assert op.forward == "aten.mul.Tensor"
        assert op.line[0].co_filename.endswith("modeling_llama.py")
        assert op.line[0].co_name == "forward"


def test_a_derivative_knows_what_its_forward_returned():
    _, trace = recorded(llama("plain"))
    (silu,) = (
        op for op in trace.ops if op.node == "SiluBackward0" and op.module.endswith("1.mlp.act_fn")
    )
    made = trace.ops[silu.made_by]
    assert (made.name, made.module) == (silu.forward, silu.module)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


def test_what_a_hook_computes_is_no_derivative():
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)
            self.proj.weight.register_hook(lambda grad: grad.sinh())
            self.proj.register_full_backward_hook(lambda _m, _i, out: (out[0].asinh(),))

        def forward(self, x):
            hidden = Halved.apply(self.proj(x))
            hidden.register_hook(lambda grad: grad.exp())
            hidden = hidden.tanh()
            hidden.register_hook(lambda grad: grad.cosh())
            return hidden

    model = Hooked()
    given = torch.randn(4, 8).requires_grad_()
    _, trace = recorded(model, lambda m, b: m(b["x"]).sum(), {"x": given})
    ops = {op.name.split(".")[1]: op for op in trace.ops if op.phase == "backward"}
    for name in ("sinh", "asinh", "exp", "cosh"):
        assert (ops[name].forward, ops[name].line[0].co_name) == (None, "<lambda>")
        assert ops[name].node is not None
    assert ops["tanh_backward"].forward == "aten.tanh.default"
    assert ops["mul"].forward == "Halved"


def test_recomputation_is_a_phase_of_its_own():
    def ops(kind, phase):
        return [op.name for op in recorded(llama(kind))[1].ops if op.phase == phase and op.module]

    plain = ops("plain", "forward")
    assert ops("plain", "recompute") == []
    for kind in ("reentrant", "non-reentrant"):
        again = ops(kind, "recompute")
        assert 0.7 * len(plain) < len(again) <= len(plain)
        assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in again


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_function_is_placed_in_the_module_that_called_it(reentrant):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(lambda y: y.exp().sin(), self.proj(x), use_reentrant=reentrant)

    model = nn.Sequential(Outer())
    _, trace = recorded(model, lambda m, b: m(b["x"]).sum(), {"x": torch.randn(4, 8)})
    places = {(op.name.split(".")[1], op.phase): op.module for op in trace.ops}
    assert places["sin", "forward"] == "0"
    assert places["exp", "recompute"] == "0"
    assert places["cos", "backward"] == "0"


def test_backward_inside_a_module_is_not_taken_for_recomputation():
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 1)

        def forward(self, x):
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).exp().sum(), x, create_graph=True)
            return slope.square().sum()

    _, trace = recorded(Penalised(), lambda m, b: m(b["x"]), {"x": torch.randn(4, 8)})
    products = [op for op in trace.ops if op.node == "ExpBackward0"]
    assert products
    assert "recompute" not in {op.phase for op in trace.ops}


def test_in_place_writes_through_views():
    class Body(nn.Module):
        def forward(self, x):
            y = x.clone()
            y[:, 0].mul_(3)
            y[:, 1:3].add_(1)
            return y.sin()

    model = Net(Body())
    _, trace = recorded(model)
    backward = [op for op in trace.ops if op.phase == "backward" and "CopySlices" in op.node]
    assert backward
    assert {op.module for op in backward} == {"body"}


def test_accumulation_is_placed_at_the_parameter():
    def twice(model, batch):
        model(**batch).backward()
        return model(**batch)

    _, trace = recorded(Net(lambda x: x), twice)
    added = [op for op in trace.ops if op.forward == "AccumulateGrad" and "add_" in op.name]
    assert {op.module for op in added} == {"embed", "proj", "head"}
    assert len(added) == 5


def test_loss_outside_the_module_has_its_own_phase():
    _, trace = recorded(Net(lambda x: x), lambda m, b: m(**b).exp())
    assert next(op.name for op in trace.ops if op.phase == "loss") == "aten.exp.default"
    assert next(op.phase for op in trace.ops) == "forward"


def test_operations_of_a_hook_belong_to_its_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda _m, _a, output: output * 3)
    model[1].register_forward_pre_hook(lambda _m, args: (args[0] - 1,))
    recorder = Recorder(model, {})
    with recorder:
        model(torch.ones(2, 4)).exp()
    ops = {op.name.split(".")[1]: op.module for op in recorder.finish().ops}
    assert (ops["mul"], ops["sub"], ops["exp"]) == ("0", "1", "")
    assert [len(layer._forward_hooks) for layer in model] == [1, 0]
    assert not model[0]._forward_hooks_always_called


def test_module_that_leaves_by_exception_does_not_stay_on_the_stack():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("inside")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Fails()
            self.proj = nn.Linear(8, 8)

        def forward(self, x):
            try:
                self.fails(x)
            except KeyError:
                x = x.sin()
            return self.proj(x)

    _, trace = recorded(
        nn.Sequential(Outer()), lambda m, b: m(b["x"]).sum(), {"x": torch.ones(2, 8)}
    )
    assert {op.name: op.module for op in trace.ops}["aten.sin.default"] == "0"


def test_integer_operands_carry_data_flow_without_a_range():
    _, trace = recorded(Net(lambda x: x))
    lookup = next(op for op in trace.ops if op.name == "aten.embedding.default")
    assert [value.slot >= 0 for value in lookup.inputs] == [True, False]
    assert lookup.inputs[1].storage.name == "batch[input_ids]"


@pytest.mark.parametrize("foreach", [False, True])
def test_list_ops_keep_their_lanes(foreach):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=foreach, momentum=0.9)
    step = FnStep(model, lambda m, b: m(b["x"]).sum(), [{"x": torch.randn(2, 8)}], optimizer)
    trace = record(step, 0, update=True).trace
    written = {
        (value.lane, value.storage.name)
        for op in trace.ops
        for value in op.outputs
        if value.storage.name
    }
    assert {name for _, name in written} == {"weight", "bias"}
    assert {lane for lane, _ in written} == ({0, 1} if foreach else {None})
    assert {op.phase for op in trace.ops} == {"optimizer"}


@pytest.mark.parametrize("kind", ["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_recording_changes_no_bit(kind, dtype):
    def run(recorder_type):
        model = llama(kind).to(dtype)
        torch.manual_seed(1)
        with recorder_type(model):
            loss = planted.called(model, planted.text_batch())
            (loss + torch.rand(())).backward()
        return loss.detach(), torch.get_rng_state(), [p.grad for p in model.parameters()]

    plain = run(lambda model: torch.enable_grad())
    watched = run(lambda model: Recorder(model, named(model)))
    assert torch.equal(plain[0], watched[0])
    assert torch.equal(plain[1], watched[1])
    assert all(torch.equal(a, b) for a, b in zip(plain[2], watched[2], strict=True))


def test_no_hook_or_mode_is_left_behind():
    from torch.nn.modules import module

    before = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    step = FnStep(Net(lambda x: x / 0), planted.called, [planted.text_batch()])
    assert localize(step, 0) is not None
    assert (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)) == before
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def fake_tensors(model, batch):
    with FakeTensorMode():
        _ = torch.empty(3, 3) @ torch.empty(3, 3)
    return model(batch["x"]).log().mean()


def meta_tensors(model, batch):
    _ = torch.empty(3, 3, device="meta") @ torch.empty(3, 3, device="meta")
    return model(batch["x"]).log().mean()


def quantized_tensors(model, batch):
    packed = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)
    return (model(batch["x"]) + packed.dequantize()).sub(100).log().mean()


def jagged_tensors(model, batch):
    ragged = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    return model(ragged).values().sub(100).log().mean()


def mapped(model, batch):
    return torch.vmap(lambda row: model(row).sub(100).log().sum())(batch["x"]).mean()


def functional_gradient(model, batch):
    torch.func.grad(lambda x: model(x).sum())(batch["x"])
    return model(batch["x"]).sub(100).log().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "loss",
    [fake_tensors, meta_tensors, quantized_tensors, jagged_tensors, mapped, functional_gradient],
)
def test_unusual_tensors_do_not_disturb(loss):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    step = FnStep(model, loss, [{"x": torch.randn(4, 8)}])
    found = localize(step, 0)
    assert found.key.op == "aten.log.default"
    assert found.first_bad.wider in ("nonfinite", "unknown")


@pytest.mark.filterwarnings("ignore")  # torch's own, once in a process, of quantized tensors
def test_what_cannot_be_measured_is_named():
    def loss(model, batch):
        packed = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)
        return (model(batch["x"]) + packed.dequantize()).sub(100).log().mean()

    found = localize(FnStep(nn.Linear(8, 8), loss, [{"x": torch.randn(4, 8)}]), 0)
    assert any("aten.dequantize.self" in spot for spot in found.blind_spots)


def test_wrapper_tensors_are_opened():
    """A weight kept as a pair of tensors: the ops on its parts are the ones recorded."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    weight = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    step = FnStep(model, lambda m, b: m(b["x"]).sub(100).log().sum(), [{"x": torch.randn(4, 8)}])
    found = localize(step, 0)
    assert (found.key.op, found.key.kind) == ("aten.log.default", "nan")


def test_an_op_that_cannot_be_looked_at_still_runs(monkeypatch):
    from nanstop.tracing import operators

    def refuses(tensor):
        raise RuntimeError("no such reduction")

    monkeypatch.setattr(operators, "extremes", refuses)
    model = Net(lambda x: x)
    _recorder, trace = recorded(model)
    assert {"aten.addmm.default", "aten.embedding.default"} <= set(trace.unseen)
    assert all(p.grad is not None for p in model.parameters())


def test_ops_between_models_that_a_script_calls_by_itself_are_the_scripts_own():
    held = nn.Module()
    held.body, held.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def loss(model, batch):
        pooled = torch.log(model.body(batch["x"]).relu().mean(0, keepdim=True) * 0)
        return model.head(pooled).mean()

    batch = {"x": torch.randn(4, 8)}
    found = localize(FnStep(held, loss, [batch]), 0)
    assert (found.key.op, found.key.module, found.key.phase) == ("aten.log.default", "", "loss")


@pytest.mark.parametrize("copy", [lambda x: x.to(torch.float64), lambda x: x.t().contiguous()])
def test_a_copy_without_autograd_is_an_op(copy):
    """Inference mode hands ``to`` and ``contiguous`` on as they are, declared as views."""
    x = torch.ones(3, 4)
    recorder = Recorder(nn.Identity(), {"x": x})
    again = []
    with torch.inference_mode(), recorder:
        made = copy(x) / 0.0
    with torch.inference_mode(), SecondRun(lambda _, func, *__: again.append(str(func))):
        copy(x) / 0.0
    trace = recorder.finish()
    copied, divided = trace.ops
    assert made.isinf().all()
    assert copied.inputs[0].storage.name == "x"
    assert divided.inputs[0].storage is copied.outputs[0].storage
    assert again == [copied.name, divided.name]
