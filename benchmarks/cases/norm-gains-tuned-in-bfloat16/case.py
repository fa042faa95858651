"""Only the gains of the norms are tuned, in bfloat16: none of them is ever moved."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from tiny import quiet_args

CLASSES, SIDE = 3, 16


def images(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Noise with a bright corner that tells the class."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        pixels = torch.rand(3, SIDE, SIDE, generator=generator)
        pixels[number % CLASSES, :8, :8] += 1.0
        made.append({"pixel_values": pixels, "labels": torch.tensor(number % CLASSES)})
    return made


def train(*, dtype: torch.dtype) -> None:
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
            initializer_range=0.2,
        )
    ).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layernorm" in name and name.endswith("weight")
    args = TrainingArguments(
        **quiet_args(
            max_steps=60,
            learning_rate=1e-3,
            optim="adamw_torch",
            per_device_train_batch_size=6,
            logging_steps=20,
            lr_scheduler_type="constant",
        )
    )

    def as_batch(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.stack([one["pixel_values"] for one in samples]).to(dtype),
            "labels": torch.stack([one["labels"] for one in samples]),
        }

    Trainer(model=model, args=args, train_dataset=images(48), data_collator=as_batch).train()
    model.float().eval()
    batch = as_batch(images(9, seed=1))
    with torch.no_grad():
        loss = model(pixel_values=batch["pixel_values"].float(), labels=batch["labels"]).loss
    print(f"final_loss={float(loss):.6f}")


if __name__ == "__main__":
    train(dtype=torch.bfloat16)
