"""Set-ups that cannot train as they stand, of models and of machines."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from nanstop.diagnose.evidence.stacks import stacks
from nanstop.faults.parts import WIDTH, GatedMlp, Model, RootMeanSquareNorm, diagonal, ones, trained
from nanstop.faults.specimen import Batch, Entry, Specimen, pair, run_plain
from nanstop.numerics.tensors import HALF, format_name
from nanstop.records import Environment, ParamGroup, RunFacts


class WideFamily(nn.Module):
    """A frozen base in the format ``stored``; ``config`` names a family, as in transformers."""

    def __init__(self, model_type: str, declared: torch.dtype, stored: torch.dtype) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=model_type, dtype=declared)
        self.base = GatedMlp(scale=2.0).to(stored).requires_grad_(False)
        self.head = diagonal(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x.to(self.base.up.weight.dtype)).float() + x)


def declared_bfloat16(dtype: torch.dtype) -> Specimen:
    """A frozen base of a wide family stored in ``dtype``, and a trainable float32 head."""
    model = WideFamily(model_type="gemma3_text", declared=torch.bfloat16, stored=dtype)
    return trained(model, optimizer=torch.optim.SGD(model.head.parameters(), lr=1e-4))


def narrow_for_its_family(specimen: Specimen) -> bool:
    """Return whether a model that was trained in bfloat16 is stored in float16."""
    declared = getattr(getattr(specimen.model, "config", None), "dtype", None)
    stored = {parameter.dtype for parameter in specimen.model.parameters()}
    return torch.float16 in stored and declared == torch.bfloat16


def half_trainables(dtype: torch.dtype) -> Specimen:
    """A trainable head stored in ``dtype``; an eps that it holds, so that nothing fails."""
    model = nn.Sequential(diagonal(1.0), diagonal(0.5).to(dtype))
    model[0].requires_grad_(False)

    def loss_fn(batch: Batch) -> Tensor:
        return model[1](model[0](batch["x"]).to(dtype)).float().pow(2).mean()

    return trained(
        model, loss_fn, optimizer=torch.optim.AdamW(model[1].parameters(), lr=1e-4, eps=1e-4)
    )


def trains_half(specimen: Specimen) -> bool:
    """Return whether a trainable parameter is stored in half precision."""
    return any(p.dtype in HALF for p in specimen.model.parameters() if p.requires_grad)


def on_v100(dtype: torch.dtype) -> Specimen:
    """A model in ``dtype``, and the facts of a machine with a V100; nothing fails here."""
    model = Model(layer=diagonal(1.0)).to(dtype)
    return trained(
        model,
        lambda batch: model(batch["x"].to(dtype)).float().pow(2).mean(),
        environment=Environment(
            nanstop="0", python="3.11", gpu="Tesla V100-SXM2-32GB", capability="7.0"
        ),
    )


def has_no_units(specimen: Specimen) -> bool:
    """Return whether the weights are in bfloat16 on a machine whose GPU is older than Ampere."""
    stored = {parameter.dtype for parameter in specimen.model.parameters()}
    machine = specimen.environment
    old = machine is not None and machine.capability is not None and machine.capability < "8.0"
    return old and torch.bfloat16 in stored


class PackedLinear(nn.Module):
    """A linear layer with an int8 weight, one scale a row, and adapters of ``rank`` if not 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((127 * torch.eye(WIDTH)).to(torch.int8), requires_grad=False)
        self.scale = nn.Buffer(torch.full((WIDTH, 1), 1 / 127))
        self.lora_A = nn.Linear(WIDTH, rank, bias=False) if rank else None
        self.lora_B = nn.Linear(rank, WIDTH, bias=False) if rank else None
        if self.lora_B is not None:
            nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, self.weight.float() * self.scale)
        if self.lora_A is None or self.lora_B is None:
            return base
        return base + self.lora_B(self.lora_A(x))


class PackedBlock(nn.Module):
    """A packed layer and a norm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.project = PackedLinear(rank)
        self.norm = RootMeanSquareNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.project(x))


def packed_base(rank: int) -> Specimen:
    """An int8 base with adapters of ``rank``; with none, only its norm can learn."""
    torch.manual_seed(0)
    model = Model(block=PackedBlock(rank))
    if rank:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    learning = [p for p in model.parameters() if p.requires_grad]
    return trained(
        model,
        # Of one element: the norm leaves nothing to learn about the length of all.
        lambda batch: (model(batch["x"])[..., 0] - 2.0).pow(2).mean(),
        optimizer=torch.optim.SGD(learning, lr=1e-4),
    )


def packed_alone(specimen: Specimen) -> bool:
    """Return whether weights are whole numbers and no adapter learns beside them."""
    parameters = dict(specimen.model.named_parameters())
    packed = any(not p.is_floating_point() for p in parameters.values())
    return packed and not any("lora_" in n and p.requires_grad for n, p in parameters.items())


def on_h20(cublas: str) -> Specimen:
    """A model in bfloat16, and the facts of an H20 with this cuBLAS; nothing fails here."""
    model = Model(layer=diagonal(1.0)).to(torch.bfloat16)
    return trained(
        model,
        lambda batch: model(batch["x"].bfloat16()).float().pow(2).mean(),
        environment=Environment(
            nanstop="0", python="3.11", gpu="NVIDIA H20", capability="9.0", cublas=cublas
        ),
    )


def stands_on_known_stack(specimen: Specimen) -> bool:
    """Return whether the machine and the formats of the weights are those of a published defect."""
    dtypes = {format_name(p.dtype) for p in specimen.model.parameters()}
    groups = tuple(
        ParamGroup(dtype=each, trainable=True, num_tensors=1, num_elements=1) for each in dtypes
    )
    facts, machine = RunFacts(param_groups=groups), specimen.environment
    return machine is not None and any(one.stands(machine, facts) for one in stacks())


class TinyForSequenceClassification(nn.Module):
    """A base and a score for each sequence, read at its last token."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=0)
        self.model = diagonal(1.0)
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.model(x))[:, -1, 0]


def scored(head: str) -> Specimen:
    """A new score head on a base, "frozen" or "trained"."""
    torch.manual_seed(0)
    model = TinyForSequenceClassification()
    model.score.requires_grad_(head == "trained")
    learning = [p for p in model.parameters() if p.requires_grad]
    return trained(
        model,
        lambda batch: (model(batch["x"]) - 1.0).pow(2).mean(),
        optimizer=torch.optim.SGD(learning, lr=1e-4),
    )


def frozen_head(specimen: Specimen) -> bool:
    """Return whether a training leaves the score head as it was."""
    head = specimen.model.get_submodule("score").get_parameter("weight")
    before = head.detach().clone()
    run_plain(specimen)
    return torch.equal(before, head)


def adam_at(rate: float) -> Specimen:
    """Four steps of Adam at this learning rate, from weights of 0.1."""
    model = Model(layer=diagonal(0.1))
    return trained(
        model,
        lambda batch: (model(batch["x"]) - 0.05).pow(2).mean(),
        batches=({"x": ones()},) * 4,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate),
    )


def moves_too_far(specimen: Specimen) -> bool:
    """Return whether the loss is ten times what it was after a few steps."""
    losses = run_plain(specimen).losses
    return losses[-1] > 10.0 * losses[0]


def optimizer_of(place: str) -> Specimen:
    """An optimizer that was made before the model's layer was replaced, or ("after") behind it."""
    model = Model(layer=diagonal(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model.layer = diagonal(1.0)
    if place == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return trained(model, optimizer=optimizer)


def learns_nothing(specimen: Specimen) -> bool:
    """Return whether a training leaves every weight as it was."""
    before = [p.detach().clone() for p in specimen.model.parameters()]
    run_plain(specimen)
    return all(map(torch.equal, before, specimen.model.parameters()))


def classified(ending: str) -> Specimen:
    """A cross entropy of four classes over the output of a ``softmax``, or of the last layer."""
    model = Model(head=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        logits = model(batch["x"]).flatten(0, -2)
        labels = batch["kind"].expand(len(logits))
        return F.cross_entropy(logits.softmax(-1) if ending == "softmax" else logits, labels)

    x = ones(rows=2)
    x[0, :, 0] = 3.0
    return trained(model, loss_fn, batches=({"x": x, "kind": torch.tensor([0])},) * 2)


def does_not_reward_being_sure(specimen: Specimen) -> bool:
    """Return whether the loss stays far from 0 when the right class is all but certain."""
    batch = {"x": 30.0 * torch.eye(WIDTH)[:1].expand(1, 2, WIDTH), "kind": torch.tensor([0])}
    return specimen.loss_fn(batch).item() > 0.1


def validated(ending: str) -> Specimen:
    """Four steps with a validation after the second, which puts the model back or ("left") not."""
    model = nn.Sequential(diagonal(1.0), nn.Dropout(0.5), diagonal(0.5))

    def loss_fn(batch: Batch) -> Tensor:
        if bool(batch["validates"]):
            model.eval()
            with torch.no_grad():
                model(batch["x"])
            model.train(ending != "left")
        return model(batch["x"]).pow(2).mean()

    steps = [{"x": ones(), "validates": torch.tensor(step == 2)} for step in range(4)]
    return trained(model, loss_fn, batches=tuple(steps))


def ends_in_evaluation_mode(specimen: Specimen) -> bool:
    """Return whether a training that began in training mode ends in the other."""
    began = specimen.model.training
    run_plain(specimen)
    return began and not specimen.model.training


FAULTS: Mapping[str, Entry] = {
    "NS101": pair(
        declared_bfloat16, torch.float16, torch.bfloat16, narrow_for_its_family, quiet=True
    ),
    "NS102": pair(half_trainables, torch.float16, torch.float32, trains_half, quiet=True),
    "NS104": pair(on_v100, torch.bfloat16, torch.float32, has_no_units, quiet=True),
    "NS107": pair(packed_base, 0, 2, packed_alone, quiet=True),
    "NS108": pair(on_h20, "12.1.3.1", "12.4.5.8", stands_on_known_stack, quiet=True),
    "NS109": pair(scored, "frozen", "trained", frozen_head, quiet=True),
    "NS113": pair(adam_at, 1.0, 1e-3, moves_too_far, quiet=True),
    "NS114": pair(optimizer_of, "before", "after", learns_nothing, quiet=True),
    "NS118": pair(classified, "softmax", "logits", does_not_reward_being_sure, quiet=True),
    "NS119": pair(validated, "left", "put back", ends_in_evaluation_mode, quiet=True),
}
