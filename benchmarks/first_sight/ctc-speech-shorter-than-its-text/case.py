"""A speech model learns to write; one recording is a fraction of a second with a long text."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor

from tiny import build

SAMPLES, SHORT = 1600, 200


def recordings(num: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Each of ten letters is a tone of 100 samples; recording 13 was cut off."""
    draw = torch.Generator().manual_seed(seed)
    tones = (torch.arange(100) * torch.arange(1, 11)[:, None] * 0.05).sin()
    made = []
    for number in range(num):
        letters = torch.randint(1, 11, (8,), generator=draw)
        sound = tones[letters - 1].repeat_interleave(2, 0).reshape(-1)
        sound = sound + 0.05 * torch.randn(SAMPLES, generator=draw)
        made.append((sound[: SHORT if number == 13 and seed == 0 else SAMPLES], letters))
    return made


def train(*, drop_short: bool) -> None:
    model = build(
        "Wav2Vec2ForCTC",
        vocab_size=11,
        num_hidden_layers=2,
        conv_dim=(32, 32),
        conv_kernel=(10, 4),
        conv_stride=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        hidden_dropout=0.0,
        layerdrop=0.0,
        ctc_loss_reduction="mean",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [
        (sound, text)
        for sound, text in recordings(40)
        if not drop_short or len(sound) // 40 >= 2 * len(text)
    ]
    for number, (sound, text) in enumerate(data):
        loss = model(input_values=sound[None], labels=text[None]).loss
        (loss / 2).backward()
        print(f"recording {number} loss {loss.item():.4f}")
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    sound, text = recordings(1, seed=1)[0]
    with torch.no_grad():
        print(f"final_loss={model(input_values=sound[None], labels=text[None]).loss.item():.6f}")


if __name__ == "__main__":
    train(drop_short=False)
