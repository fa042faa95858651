"""A checkpoint of a mixture of experts has a NaN in an expert that few tokens reach."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import VOCAB, build, finish

RARE = 7


def batches(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Ids that follow each other; from the fourth step on there is the rare token."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        ids = torch.randint(20, VOCAB - 16, (2, 1), generator=generator) + torch.arange(12)
        if number >= 7:
            ids[1, 4] = RARE
        made.append({"input_ids": ids, "labels": ids})
    return made


def checkpoint(damaged: bool) -> torch.nn.Module:
    """Expert 3 of the first layer is that of the rare token alone."""
    model = build(
        "MixtralForCausalLM",
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        router_aux_loss_coef=0.0,
    )
    with torch.no_grad():
        direction = torch.nn.functional.one_hot(torch.tensor(0), 64).float()
        model.model.embed_tokens.weight[:, 0] = -0.1
        model.model.embed_tokens.weight[RARE] = 0.2 * direction
        router = next(
            p for n, p in model.named_parameters() if n.endswith("layers.0.mlp.gate.weight")
        )
        router[3] = 20.0 * direction
        if damaged:
            experts = dict(model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
            experts[3, 10, 10] = float("nan")
    return model


def train(*, damaged: bool) -> None:
    model = checkpoint(damaged)
    model.model.embed_tokens.weight.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            "experts" not in name and "gate" not in name and "embed" not in name
        )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for number, batch in enumerate(batches(16)):
        loss = model(**batch).loss / 2
        loss.backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {2 * loss.item():.4f}")
    finish(model, batches(8, seed=1)[0])


if __name__ == "__main__":
    train(damaged=True)
