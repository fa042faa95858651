"""A linear-chain tagger: impossible transitions are -Inf, and one tag cannot be reached at all."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn

from tiny import build

TAGS, LENGTH = 4, 8


class Tagger(nn.Module):
    """BERT with a chain of tags; tag 3 goes on from tag 2 only and no text begins with it."""

    def __init__(self, forbidden: float) -> None:
        super().__init__()
        self.bert = build("BertModel", num_hidden_layers=2, hidden_dropout_prob=0.0)
        self.emit = nn.Linear(64, TAGS)
        self.transition = nn.Parameter(torch.zeros(TAGS, TAGS))
        barred, start = torch.zeros(TAGS, TAGS), torch.zeros(TAGS)
        barred[[0, 1, 3], 3] = forbidden
        barred[2, 2] = barred[2, 1] = forbidden
        start[[2, 3]] = forbidden
        barred[:, 2] = torch.tensor([0.0, 0.0, forbidden, 0.0])
        self.register_buffer("barred", barred)
        self.register_buffer("start", start)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        emitted = self.emit(self.bert(input_ids=ids).last_hidden_state)
        moves = self.transition + self.barred
        reached = self.start + emitted[:, 0]
        for place in range(1, ids.shape[1]):
            reached = torch.logsumexp(reached[:, :, None] + moves, dim=1) + emitted[:, place]
        path = emitted.gather(-1, tags[..., None]).sum((1, 2))
        path = path + moves[tags[:, :-1], tags[:, 1:]].sum(-1) + self.start[tags[:, 0]]
        return (torch.logsumexp(reached, dim=-1) - path).mean()


def texts(num: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Words of the lower half are tag 0, the others tag 1."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 128, (4, LENGTH), generator=draw) for _ in range(num)]
    return [(batch, (batch > 64).long()) for batch in ids]


def train(*, forbidden: float) -> None:
    torch.manual_seed(0)
    model = Tagger(forbidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (ids, tags) in enumerate(texts(24, seed=0)):
        loss = model(ids, tags)
        (loss / 2).backward()
        print(f"batch {number} loss {loss.item():.4f}")
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        print(f"final_loss={model(*texts(1, seed=1)[0]).item():.6f}")


if __name__ == "__main__":
    train(forbidden=float("-inf"))
