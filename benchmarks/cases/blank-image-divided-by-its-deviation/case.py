"""Images are normalised one by one; some scans are blank."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from tiny import quiet_args

CLASSES, SIDE = 3, 16


def images(num: int, blank: tuple[int, ...], seed: int = 0) -> list[dict[str, Tensor]]:
    """Noise with a bright corner that tells the class; those of ``blank`` are white."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        label = int(torch.randint(CLASSES, (1,), generator=generator))
        pixels = torch.rand(3, SIDE, SIDE, generator=generator)
        pixels[label, :8, :8] += 1.0
        if number in blank:
            pixels[:] = 1.0
        made.append({"pixel_values": (pixels - pixels.mean()) / pixels.std(), "labels": label})
    return made


def collate(samples: list[dict[str, Tensor]], skip_blank: bool) -> dict[str, Tensor]:
    kept = [s for s in samples if not skip_blank or bool(s["pixel_values"].isfinite().all())]
    return {
        "pixel_values": torch.stack([sample["pixel_values"] for sample in kept]),
        "labels": torch.tensor([sample["labels"] for sample in kept]),
    }


def train(*, skip_blank: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=SIDE,
            patch_size=4,
            num_labels=CLASSES,
        )
    )
    data = images(64, blank=(11,))
    args = TrainingArguments(
        **quiet_args(max_steps=8, gradient_accumulation_steps=2, remove_unused_columns=False)
    )
    collator = partial(collate, skip_blank=skip_blank)
    Trainer(model=model, args=args, train_dataset=data, data_collator=collator).train()
    model.eval()
    with torch.no_grad():
        loss = model(**collate(images(8, blank=(), seed=1), skip_blank)).loss
    print(f"final_loss={float(loss):.6f}")


if __name__ == "__main__":
    train(skip_blank=False)
