"""Speech: convolutions, a bidirectional GRU, CTC over packed lengths, OneCycle."""

import argparse

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "text-longer-than-sound"), default="none")
parser.add_argument("--out", default="left.jsonl")


class SpeechRecognitionModel(nn.Module):
    def __init__(self, n_feats=12, n_class=9):
        super().__init__()
        self.cnn = nn.Conv1d(n_feats, 24, 3, stride=2, padding=1)
        self.layer_norm = nn.LayerNorm(24)
        self.rnn = nn.GRU(24, 16, batch_first=True, bidirectional=True)
        self.classifier = nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, n_class))

    def forward(self, x, lengths):
        x = nn.functional.gelu(self.layer_norm(self.cnn(x).transpose(1, 2)))
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        x, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.classifier(x)


def batches(num, fault):
    for step in range(num):
        labels = torch.randint(1, 9, (6, 4))
        label_lengths = torch.randint(2, 5, (6,))
        spectrograms = torch.randn(6, 12, 32) * 0.3
        spectrograms += labels.repeat_interleave(8, 1).unsqueeze(1) / 4
        lengths = torch.randint(12, 17, (6,))
        lengths[0] = 16
        if fault and step == 9:
            lengths[2], label_lengths[2] = 2, 4
        yield spectrograms, labels, lengths, label_lengths


def main(args):
    torch.manual_seed(7)
    record = Record(args.out)
    model, criterion = SpeechRecognitionModel(), nn.CTCLoss(blank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=20)
    fault = args.fault == "text-longer-than-sound"
    for step, (x, labels, lengths, label_lengths) in enumerate(batches(20, fault)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            output = model(x, lengths)
        output = nn.functional.log_softmax(output.float(), dim=2).transpose(0, 1)
        loss = criterion(output, labels, lengths, label_lengths)
        loss.backward()
        optimizer.step()
        scheduler.step()
        record(step, model, loss=loss.item())
    model.eval()
    torch.manual_seed(70)
    x, labels, lengths, label_lengths = next(batches(1, fault=False))
    with torch.no_grad():
        output = nn.functional.log_softmax(model(x, lengths), dim=2).transpose(0, 1)
        record.end(output, loss=criterion(output, labels, lengths, label_lengths))


if __name__ == "__main__":
    main(parser.parse_args())
