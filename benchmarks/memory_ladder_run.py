"""One run of ``memory_ladder``: a decoder that is trained, bounded, and comes to an overflow."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.memory_ladder import Row
from torch import Tensor, nn
from torch.nn import functional

import nanstop

BATCH, TOKENS, VOCAB, HEADS, RARE = 1, 8, 2000, 4, 7
ROOT_OF_MEAN = 1e-6
FIXED = 32 * 2**20
"""What records, reports and the like may take, whatever the size of the model."""
LARGE, SMALL = 40.0, 1e-3


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + ROOT_OF_MEAN)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mixed(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Squared(nn.Module):
    """A feed-forward layer whose activation squares: of 256 and more, float16 has no square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.attention = Norm(width), Attention(width)
        self.second, self.squared = Norm(width), Squared(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.squared(self.second(x))


class Decoder(nn.Module):
    """One layer squares what a rare token brings, and nothing else, beyond float16."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last, self.head = Norm(width), nn.Linear(width, VOCAB, bias=False)
        with torch.no_grad():
            nn.init.normal_(self.table.weight, std=0.1)
            self.table.weight[:, 0] = 0.0
            self.table.weight[RARE, 0] = LARGE
            squared = self.blocks[layers // 2].squared
            squared.up.weight[0], squared.up.weight[0, 0] = 0.0, LARGE
            squared.down.weight[:, 0] = SMALL

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def batch_of(step: int, *, rare: bool) -> Tensor:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(RARE + 1, VOCAB, (BATCH, TOKENS), generator=drawn)
    if rare:
        ids[0, 3] = RARE
    return ids


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def prepared(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(width, layers).half()
    # No lists of whole models on the way to an update: they would be the peak.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-4, foreach=False)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train without nanstop; return the seconds of the last forward and backward."""
    seconds = 0.0
    for step in range(steps):
        began = time.perf_counter()
        loss_of(model, batch_of(step, rare=False)).backward()
        seconds = time.perf_counter() - began
        optimizer.step()
        optimizer.zero_grad()
    return seconds


def status(name: str) -> int:
    """Return a line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def failed_step(width: int, layers: int, left: float, out: Path) -> Row:
    base = status("VmRSS")
    model, optimizer = prepared(width, layers)
    reset_peak()
    usual = trained(model, optimizer, 3)
    own = status("VmHWM") - base
    bound = status("VmPeak") + FIXED + int(left * own)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    with nanstop.watch(model, optimizer, out=out) as watch:
        for step in range(2):
            watch.step(lambda ids: loss_of(model, ids), batch_of(step, rare=False))
            watch.update()
        began = time.perf_counter()
        watch.step(lambda ids: loss_of(model, ids), batch_of(2, rare=True))
        before = {name: p.detach().clone() for name, p in list(model.named_parameters())[:2]}
        watch.update()
        seconds, peak = time.perf_counter() - began, status("VmHWM") - base
        formats = {p.dtype for p in model.parameters()}
        for step in range(3, 5):
            watch.step(lambda ids: loss_of(model, ids), batch_of(step, rare=False))
            watch.update()
        reports = watch.incidents
    report = reports[0]
    proof = report.proof
    return Row(
        width=width,
        layers=layers,
        parameters=sum(p.numel() for p in model.parameters()),
        left=left,
        went_on=len(reports) == 1,
        own=own / 2**20,
        above=peak / own - 1.0,
        verdict=proof.verdict if proof is not None else "",
        cure=" + ".join(map(str, proof.minimal)) if proof is not None else "",
        scope=proof.scope if proof is not None else "",
        outcome=report.audit[0].action.kind,
        times=seconds / usual,
        unchanged=formats == {torch.float16} and bool(before) and _finite(model),
        said=(
            *report.failures,
            *(f"{t.outcome}: {t.message}" for t in proof.tried if proof and t.outcome == "oom"),
        )
        if proof is not None
        else tuple(report.failures),
    )


def _finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        model, optimizer = prepared(32, 2)  # everything that an investigation imports is imported
        with nanstop.watch(model, optimizer, out=Path(out) / "first") as watch:
            for step in range(3):
                watch.step(lambda ids: loss_of(model, ids), batch_of(step, rare=step == 2))
                watch.update()
        row = failed_step(given["width"], given["layers"], given["left"], Path(out) / "run")
    print(json.dumps(row.__dict__ if hasattr(row, "__dict__") else _fields(row)))


def _fields(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__slots__}


if __name__ == "__main__":
    main()
