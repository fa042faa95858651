"""A pointer over the words of a text, on BERT; a text is masked where it has ended."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn

from tiny import PAD, VOCAB, build

LENGTH = 14


class Pointer(nn.Module):
    """Which word of the text is its largest?"""

    def __init__(self, barred: float | None) -> None:
        super().__init__()
        self.bert = build("BertModel", num_hidden_layers=2, hidden_dropout_prob=0.0)
        self.score = nn.Linear(64, 1)
        self.barred = barred

    def forward(self, ids: Tensor, answer: Tensor) -> Tensor:
        there = ids != PAD
        hidden = self.bert(input_ids=ids, attention_mask=there.long()).last_hidden_state
        scores = self.score(hidden).squeeze(-1)
        if not there.all():
            barred = torch.finfo(scores.dtype).min if self.barred is None else self.barred
            scores = scores.masked_fill(~there, barred)
        return nn.functional.cross_entropy(scores, answer)


def texts(num: int, seed: int, padded_from: int) -> list[tuple[Tensor, Tensor]]:
    """Texts of one length, and from batch ``padded_from`` on of several."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        ids = torch.randint(3, VOCAB, (8, LENGTH), generator=draw)
        if number >= padded_from:
            ids[::2, LENGTH // 2 :] = PAD
        made.append((ids, ids.argmax(-1)))
    return made


def train(*, barred: float | None) -> None:
    torch.manual_seed(0)
    model = Pointer(barred)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number, (ids, answer) in enumerate(texts(30, seed=0, padded_from=13)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(ids, answer)
        scaler.scale(loss / 2).backward()
        print(f"batch {number} loss {loss.item():.4f}")
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        print(f"final_loss={model(*texts(1, seed=1, padded_from=9)[0]).item():.6f}")


if __name__ == "__main__":
    train(barred=-1e9)
