"""What the scripts of this folder share: small data, small nets, and the choice of a spelling.

    python benchmarks/silent/NAME.py SPELLING case|healthy

A script hands ``spell`` a function for each of its spellings. Each trains for 20 updates and ends
by printing ``final_loss=NUMBER``. The line that is to blame carries the comment ``# fault``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cases"))

import torch
from torch import Tensor, nn

from tiny import llama, quiet_args, token_batches

STEPS = 20


def spell(**spellings: Callable[[bool], None]) -> None:
    """Run the spelling that the command line names, as ``case`` or as ``healthy``."""
    spelling, twin = sys.argv[1:]
    torch.manual_seed(0)
    spellings[spelling](twin == "case")


def net(width: int = 32, outputs: int = 4) -> nn.Sequential:
    """Return a classifier of points: 12 numbers in, ``outputs`` out."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


def points(num: int = STEPS, rows: int = 16, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return ``num`` batches of points [rows, 12] around four centres, with their classes."""
    centres = torch.randn(4, 12, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num):
        classes = torch.randint(4, (rows,), generator=generator)
        noise = torch.randn(rows, 12, generator=generator)
        batches.append((centres[classes] + noise, classes))
    return batches


def texts(num: int = STEPS, rows: int = 2, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return the rows of ``num`` batches one by one, as a dataset for a Trainer."""
    return [
        {name: value[row] for name, value in batch.items()}
        for batch in token_batches(num, rows=rows, seed=seed)
        for row in range(rows)
    ]


def small_llama(**overrides: Any) -> nn.Module:
    """Return a LlamaForCausalLM of one layer."""
    return llama(num_hidden_layers=1, **overrides)


def settings(**more: Any) -> Any:
    """Return TrainingArguments for 20 updates of two rows."""
    from transformers import TrainingArguments

    return TrainingArguments(**quiet_args(max_steps=STEPS, **more))


def finish(model: nn.Module) -> None:
    """Print the trained net's loss on points that it has not seen."""
    x, y = points(1, rows=64, seed=7)[0]
    with torch.no_grad():
        tell(nn.functional.cross_entropy(model.float().eval()(x), y))


def finish_text(model: nn.Module) -> None:
    """Print the trained language model's loss on texts that it has not seen, in float32."""
    batch = token_batches(1, rows=8, seed=7)[0]
    with torch.no_grad():
        tell(model.float().eval()(**batch).loss)


def tell(loss: Tensor | float) -> None:
    print(f"final_loss={float(loss):.6f}", flush=True)


def sgd_by_hand(model: nn.Module, lr: float) -> None:
    """Take one step of plain gradient descent and clear the gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
                parameter.grad = None


def moved(batch: Mapping[str, Tensor], **more: Tensor) -> dict[str, Tensor]:
    """Return a batch with some of its tensors replaced."""
    return {**batch, **more}
