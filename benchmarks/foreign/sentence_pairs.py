"""Sentence pairs: one encoder called twice, mean pooling, cosine against a score, a model
wrapped by an objective.
"""

import argparse

import torch
from record import Record
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16-scaler"), default="fp32")
parser.add_argument("--fault", choices=("none", "empty-sentence"), default="none")
parser.add_argument("--out", default="left.jsonl")


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(50, 24, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True)

    def forward(self, features):
        ids, mask = features["input_ids"], features["attention_mask"]
        tokens = self.layer(self.embeddings(ids), src_key_padding_mask=~mask.bool())
        summed = (tokens * mask.unsqueeze(-1)).sum(1)
        features["sentence_embedding"] = summed / mask.sum(1, keepdim=True)
        return features


class CosineSimilarityLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, sentence_features, labels):
        a, b = (self.model(f)["sentence_embedding"] for f in sentence_features)
        cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        return nn.functional.mse_loss(cosine.float(), labels.view(-1))


def tokenize(batch, length, *, empty=False):
    ids = torch.randint(1, 50, (batch, length))
    sizes = torch.randint(3, length + 1, (batch, 1))
    if empty:
        sizes[1] = 0
    mask = (torch.arange(length) < sizes).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def main(args):
    torch.manual_seed(5)
    record = Record(args.out)
    model = SentenceEncoder()
    objective = CosineSimilarityLoss(model)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
    half = {"bf16": torch.bfloat16}.get(args.dtype, torch.float16)
    amp = torch.autocast("cpu", dtype=half, enabled=args.dtype != "fp32")
    scaler = torch.amp.GradScaler("cpu", enabled=args.dtype == "fp16-scaler")
    for step in range(20):
        empty = args.fault == "empty-sentence" and step == 8
        pair = [tokenize(8, 10), tokenize(8, 10, empty=empty)]
        labels = (pair[0]["input_ids"][:, 0] == pair[1]["input_ids"][:, 0]).float()
        optimizer.zero_grad()
        with amp:
            loss_value = objective(pair, labels)
        scaler.scale(loss_value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        record(step, objective, loss=loss_value.item())
    model.eval()
    torch.manual_seed(6)
    with torch.no_grad():
        pair = [tokenize(8, 10), tokenize(8, 10)]
        loss = objective(pair, torch.zeros(8))
        record.end(*(f["sentence_embedding"] for f in pair), loss=loss)


if __name__ == "__main__":
    main(parser.parse_args())
