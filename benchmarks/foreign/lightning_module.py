"""A LightningModule under Lightning's Trainer: two validations, clipping, a schedule, no files."""

import argparse
import logging
import warnings

import torch
from record import Record
from torch import nn

try:
    import lightning as L
except ImportError:
    raise SystemExit("skipped: the package `lightning` is not installed") from None

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "nan-in-batch"), default="none")
parser.add_argument("--out", default="left.jsonl")


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(24, 3))

    def forward(self, x):
        return self.head(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(L.Callback):
    def __init__(self, record):
        self.record = record

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.record(trainer.global_step - 1, module, loss=outputs["loss"])


def main():
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(4, verbose=False)
    record = Record(args.out)
    y = torch.randint(0, 3, (160,))
    x = torch.randn(160, 12) + y.unsqueeze(1)
    held_out = x[:32].clone(), y[:32]
    if args.fault == "nan-in-batch":
        x[77, 3] = float("nan")
    train = torch.utils.data.TensorDataset(x[32:], y[32:])
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        precision="bf16-mixed" if args.dtype == "bf16" else "32-true",
        gradient_clip_val=1.0,
        accumulate_grad_batches=1,
        callbacks=[Recorder(record)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    held = torch.utils.data.TensorDataset(*held_out)
    trainer.fit(
        model,
        torch.utils.data.DataLoader(train, batch_size=16, shuffle=True),
        torch.utils.data.DataLoader(held, batch_size=16),
    )
    model.eval()
    with torch.no_grad():
        output = model(held_out[0])
        record.end(output, loss=nn.functional.cross_entropy(output, held_out[1]))


if __name__ == "__main__":
    main()
