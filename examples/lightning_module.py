"""A LightningModule under Lightning's Trainer: clipping, a schedule, a validation.

Needs `pip install nanstop[lightning]`.
"""

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 3)
        )

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = F.cross_entropy(self.layers(features), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        features, labels = batch
        self.log("val_loss", F.cross_entropy(self.layers(features), labels))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    L.seed_everything(0, verbose=False)
    labels = torch.randint(0, 3, (352,))
    features = torch.randn(352, 16) + labels.unsqueeze(1)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(
        model,
        DataLoader(TensorDataset(features[32:], labels[32:]), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(features[:32], labels[:32]), batch_size=32),
    )
    print(f"validation loss {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
