"""One function a finding: with one argument it builds the fault, with another the healthy twin."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from nanstop.faults.parts import (
    WIDTH,
    EagerAttention,
    FusedAttention,
    GatedMlp,
    HiddenWrite,
    Model,
    NormedHead,
    TokenModel,
    WideFamily,
    diagonal,
    ones,
)
from nanstop.faults.specimen import Batch, Specimen
from nanstop.records import Environment


def _sgd(model: nn.Module, lr: float = 1e-4) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def _half(loss_fn: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Run the loss under float16 autocast of the CPU."""

    def run(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return loss_fn(batch)

    return run


def hidden_write(poison: float) -> Specimen:
    """A gradient buffer is filled through NumPy, behind torch's back."""
    model = Model(layer=diagonal(1.0))
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: HiddenWrite.apply(model(batch["x"]), poison).pow(2).mean(),
        batches=({"x": ones()},),
    )


def declared_bfloat16(dtype: torch.dtype) -> Specimen:
    """A frozen base of a wide family stored in ``dtype``, and a trainable float32 head."""
    model = WideFamily(model_type="gemma3_text", declared=torch.bfloat16, stored=dtype)
    return Specimen(
        model=model,
        optimizer=_sgd(model.head),
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones()},),
    )


def half_trainables(dtype: torch.dtype) -> Specimen:
    """A trainable head stored in ``dtype``; plain SGD, so that nothing fails."""
    model = nn.Sequential(diagonal(1.0), diagonal(0.5).to(dtype))
    model[0].requires_grad_(False)

    def loss_fn(batch: Batch) -> Tensor:
        return model[1](model[0](batch["x"]).to(dtype)).float().pow(2).mean()

    return Specimen(
        model=model, optimizer=_sgd(model[1]), loss_fn=loss_fn, batches=({"x": ones()},)
    )


def new_tokens(fill: float | None) -> Specimen:
    """Two tokens were added; their rows are ``fill``, or the mean of the others for None."""
    torch.manual_seed(0)
    model = TokenModel(num_rows=20)
    with torch.no_grad():
        weight = model.embed.weight
        # the mean of random rows is short: give it their length, as trained rows have
        mean = F.normalize(weight[:-2].mean(0), dim=0) * weight[:-2].norm(dim=1).median()
        weight[-2:] = mean if fill is None else torch.full((WIDTH,), fill)
    ids = torch.tensor([[1, 5, 18, 19], [2, 3, 4, 18]])
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: _next_token_loss(model(batch["input_ids"]), batch["labels"]),
        batches=({"input_ids": ids, "labels": ids},),
    )


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gated_product(scale: float) -> Specimen:
    """``gate(x) * up(x)`` of ``scale`` squared under float16 autocast."""
    model = Model(mlp=GatedMlp(scale))
    return Specimen(
        model=model,
        optimizer=_sgd(model, lr=1e-6),
        loss_fn=_half(lambda batch: model(batch["x"]).float().pow(2).mean()),
        batches=({"x": ones()},),
        autocast="float16",
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )


def masked_row(num_visible: int) -> Specimen:
    """One query of the second row sees ``num_visible`` keys."""
    torch.manual_seed(0)
    model = Model(attention=EagerAttention())
    visible = torch.ones(4, 6, 6).tril().bool()
    visible[1, 2] = False
    visible[1, 2, :num_visible] = True
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: model(batch["x"], batch["visible"]).pow(2).mean(),
        batches=({"x": torch.randn(4, 6, WIDTH), "visible": visible},),
    )


def logarithm(value: float) -> Specimen:
    """The logarithm of ``value``, straight from a linear layer."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2] = value
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: torch.log(model(batch["x"]).sum(-1)).mean(),
        batches=({"x": x},),
    )


def kept_mean(num_kept: int) -> Specimen:
    """The mean over the first ``num_kept`` rows, as a sum over a count."""
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        kept = batch["kept"].float()
        return (model(batch["x"]).pow(2).mean((1, 2)) * kept).sum() / kept.sum()

    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=loss_fn,
        batches=({"x": ones(), "kept": torch.arange(4) < num_kept},),
    )


def unit_rows(value: float) -> Specimen:
    """Rows divided by their norm; one row is all ``value``."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2] = value

    def loss_fn(batch: Batch) -> Tensor:
        rows = model(batch["x"])
        return (rows / rows.norm(dim=-1, keepdim=True)).pow(2)[..., 0].mean()

    return Specimen(model=model, optimizer=_sgd(model), loss_fn=loss_fn, batches=({"x": x},))


def log_ratio(value: float) -> Specimen:
    """The exponential of a log-ratio that reaches ``value``."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2] = value
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: torch.exp(model(batch["x"])).mean(),
        batches=({"x": x},),
    )


def normalisation(scale: float) -> Specimen:
    """RMS normalisation of ``scale`` under float16 autocast; its answer should not depend on it."""
    model = NormedHead(scale)
    return Specimen(
        model=model,
        optimizer=_sgd(model, lr=1e-6),
        loss_fn=_half(lambda batch: (model(batch["x"]).float() - 1.0).pow(2).mean()),
        batches=({"x": ones()},),
        autocast="float16",
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )


def summed_loss(value: float) -> Specimen:
    """The sum over 1024 rows of ``value``: each output is small, their gradient is not."""
    head = nn.Linear(WIDTH, 1, bias=False)
    nn.init.constant_(head.weight, 1e-3)
    model = Model(head=head)
    return Specimen(
        model=model,
        optimizer=_sgd(model, lr=1e-9),
        loss_fn=_half(lambda batch: model(batch["x"]).float().sum()),
        batches=({"x": torch.full((1024, WIDTH), value)},),
        autocast="float16",
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )


def scaled_run(scale: float) -> Specimen:
    """Twelve steps of ``gated_product`` under a GradScaler."""
    one = gated_product(scale)
    return Specimen(
        model=one.model,
        optimizer=one.optimizer,
        loss_fn=one.loss_fn,
        batches=one.batches * 12,
        scaler=torch.amp.GradScaler("cpu"),
        autocast="float16",
    )


def distance(gap: float) -> Specimen:
    """The distance between two projections, ``gap`` apart in one row."""
    model = Model(layer=diagonal(1.0))
    left = ones()
    right = left + 1.0
    right[1, 2] = left[1, 2] + gap

    def loss_fn(batch: Batch) -> Tensor:
        apart = model(batch["left"]) - model(batch["right"])
        return apart.pow(2).sum(-1).sqrt().mean()

    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=loss_fn,
        batches=({"left": left, "right": right},),
    )


def loaded_weights(element: float) -> Specimen:
    """One element of the second layer came as ``element``."""
    loaded = diagonal(1.0)
    model = nn.Sequential(diagonal(1.0), loaded)
    with torch.no_grad():
        loaded.weight[0, 0] = element
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones()},),
    )


def reward_head(dtype: torch.dtype, num_steps: int = 2) -> Specimen:
    """A score head stored in ``dtype`` under AdamW with its default eps, gradients of about 1e-4."""
    base, head = diagonal(0.01), nn.Linear(WIDTH, 1, bias=False).to(dtype)
    model = nn.Sequential()
    model.add_module("base", base)
    model.add_module("score", head)
    base.requires_grad_(False)
    nn.init.constant_(head.weight, 0.02)

    def loss_fn(batch: Batch) -> Tensor:
        score = head(base(batch["x"]).to(dtype)).float()
        return (score - 0.01).pow(2).mean() + 0.5

    return Specimen(
        model=model,
        optimizer=torch.optim.AdamW(head.parameters(), lr=1e-3),
        loss_fn=loss_fn,
        batches=({"x": ones()},) * num_steps,
        log_filter=True,
    )


def pixels(element: float) -> Specimen:
    """One element of the batch is ``element``."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2, 3] = element
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: model(batch["pixels"]).pow(2).mean(),
        batches=({"pixels": x},),
    )


def token_id(largest: int, label: int | None = None) -> Specimen:
    """A table of 20 rows and a batch whose largest id is ``largest``; every label is ``label`` if given."""
    torch.manual_seed(0)
    model = TokenModel(num_rows=20)
    ids = torch.tensor([[1, 5, 6, 7], [2, 3, 4, largest]])
    labels = ids.clamp(max=19) if label is None else torch.full_like(ids, label)
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: _next_token_loss(model(batch["input_ids"]), batch["labels"]),
        batches=({"input_ids": ids, "labels": labels},),
    )


def fused_attention(scale: float) -> Specimen:
    """Fused attention scales the scores after the product, plain attention before it.

    Eight products of 7e18 squared are 3.9e38, beyond float32; after the scale of 1 / sqrt(8) they are 1.4e38.
    """
    model = Model(attention=FusedAttention(scale))
    return Specimen(
        model=model,
        optimizer=_sgd(model, lr=0.0),
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones(rising=0.01)},),
    )


def flaky(num_failures: int) -> Specimen:
    """The loss is NaN for its first ``num_failures`` calls, whatever it is called with."""
    model = Model(layer=diagonal(1.0))
    calls: list[int] = []

    def loss_fn(batch: Batch) -> Tensor:
        calls.append(1)
        poison = float("nan") if len(calls) <= num_failures else 1.0
        return model(batch["x"]).pow(2).mean() * poison

    return Specimen(
        model=model, optimizer=_sgd(model), loss_fn=loss_fn, batches=({"x": ones()},) * 2
    )


def policy_gradient(stale: float) -> Specimen:
    """The objective of GRPO, its old log-probabilities off by ``stale``: on-policy for 0."""
    model = Model(head=diagonal(0.5))
    x = ones(rows=3)
    x[:, :, 0] = torch.arange(3.0)[:, None]

    def loss_fn(batch: Batch) -> Tensor:
        chosen = model(batch["x"]).log_softmax(-1)[..., 0]
        ratio = torch.exp(chosen - (chosen.detach() - stale * batch["advantage"][:, None]))
        return -(ratio * batch["advantage"][:, None]).mean()

    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=loss_fn,
        batches=({"x": x, "advantage": torch.tensor([1.0, 0.0, -1.0])},),
        zero_loss_by_design="on-policy GRPO: every ratio is 1 and the advantages sum to 0",
    )


def child_process(ending: str, limit: float = 20.0) -> Specimen:
    """The loss waits for a child process that runs the Python text ``ending``; a child that dies or hangs is an error.

    This process is spared what happens to the child.
    """
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        try:
            code = subprocess.run(
                [sys.executable, "-S", "-c", ending], timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the child stood still for {limit:g} s") from None
        if code < 0:
            raise RuntimeError(f"the child was killed by {signal.Signals(-code).name}")
        return model(batch["x"]).pow(2).mean()

    return Specimen(model=model, optimizer=_sgd(model), loss_fn=loss_fn, batches=({"x": ones()},))


def large_buffer(num_elements: int) -> Specimen:
    """The loss needs a buffer of ``num_elements`` float32."""
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        buffer = torch.zeros(num_elements)
        return model(batch["x"]).pow(2).mean() + buffer[0]

    return Specimen(model=model, optimizer=_sgd(model), loss_fn=loss_fn, batches=({"x": ones()},))


def on_h20(cublas: str) -> Specimen:
    """A model in bfloat16, and the facts of a machine with an H20 and this version of cuBLAS; nothing fails here."""
    model = Model(layer=diagonal(1.0)).to(torch.bfloat16)
    return Specimen(
        model=model,
        optimizer=_sgd(model),
        loss_fn=lambda batch: model(batch["x"].bfloat16()).float().pow(2).mean(),
        batches=({"x": ones()},),
        environment=Environment(
            nanstop="0", python="3.11", gpu="NVIDIA H20", capability="9.0", cublas=cublas
        ),
    )
