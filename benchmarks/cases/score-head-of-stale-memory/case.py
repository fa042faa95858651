"""A classifier adds a layer that its own _init_weights does not know:
loading leaves stale memory in it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny import build, token_batches


class Scorer(nn.Module):
    """An encoder with a head on its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = build("RobertaModel", num_hidden_layers=2)
        self.dense = nn.Linear(64, 64)
        self.out = nn.Linear(64, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        first = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        return self.out(torch.tanh(self.dense(first)))


def loaded(*, initialised: bool) -> Scorer:
    """Return the model as a loader makes it:
    on the meta device, then with memory, then with what the file holds.
    """
    source = Scorer()
    kept = {name: value for name, value in source.state_dict().items() if "out." not in name}
    with torch.device("meta"):
        model = Scorer()
    stale = torch.linspace(-4.0e34, 4.0e34, 64 * 3).view(3, 64)
    model.to_empty(device="cpu")
    model.load_state_dict(kept, strict=False)
    model.encoder.embeddings.load_state_dict(source.encoder.embeddings.state_dict())
    for name, buffer in source.encoder.embeddings.named_buffers():
        getattr(model.encoder.embeddings, name).copy_(buffer)
    with torch.no_grad():
        model.out.weight.copy_(stale)  # what was there before
        model.out.bias.zero_()
    if initialised:
        nn.init.normal_(model.out.weight, std=0.02)
    return model


def error(model: Scorer, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["input_ids"][:, 0] % 3
    return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), labels)


def train(*, initialised: bool) -> None:
    model = loaded(initialised=initialised)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for batch in token_batches(10, rows=4, length=10):
        loss = error(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4g}")
    model.eval()
    with torch.no_grad():
        print(
            f"final_loss={error(model, token_batches(1, rows=4, length=10, seed=1)[0]).item():.6f}"
        )


if __name__ == "__main__":
    train(initialised=False)
