"""A focal loss with an exponent of 0.5 on scaled cosines:
of an image that is classified for sure 1 - p is exactly 0.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import build, quiet_args


def cosines(model, out):
    """64 times the cosines of image and classes [rows, 2], as in CosFace."""
    image = F.normalize(out.hidden_states[-1][:, 0], dim=-1)
    return 64.0 * image @ F.normalize(model.classifier.weight, dim=-1).T


def focal(logits, labels, floor: float):
    logp = F.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]
    return -((1 - logp.exp()).clamp(min=floor) ** 0.5 * logp).mean()


def train(*, floor: float) -> None:
    from transformers import Trainer, TrainingArguments

    class Focal(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            labels = inputs.pop("labels")
            out = model(**inputs, output_hidden_states=True)
            loss = (
                focal(cosines(model, out), labels, floor) / self.current_gradient_accumulation_steps
            )
            return (loss, out) if return_outputs else loss

    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(240):
        kind = int(torch.randint(2, (1,), generator=draw))
        strength = float(torch.rand(1, generator=draw)) ** 2 + 0.1
        pixels = torch.randn(3, 16, 16, generator=draw) * 0.1 + strength * (2 * kind - 1)
        rows.append({"pixel_values": pixels, "labels": torch.tensor(kind)})
    model = build(
        "ViTForImageClassification",
        image_size=16,
        patch_size=8,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    args = TrainingArguments(
        **quiet_args(
            train_sampling_strategy="sequential",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=30,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            logging_steps=10,
        )
    )
    Focal(model, args, train_dataset=rows).train()
    model.eval()
    batch = {name: torch.stack([row[name] for row in rows[:16]]) for name in rows[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        final = F.cross_entropy(cosines(model, model(**batch, output_hidden_states=True)), labels)
    print(f"final_loss={final.item():.6f}", flush=True)


if __name__ == "__main__":
    train(floor=0.0)
