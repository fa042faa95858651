"""A causal language model under accelerate without a trainer:
prepare, accumulate, clip, schedule, gather.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from record import Record
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--fault", choices=("none", "labels-all-masked"), default="none")
    parser.add_argument("--out", default="left.jsonl")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if args.dtype == "bf16" else "no",
    )
    set_seed(42)
    record = Record(args.out)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    ids = (torch.arange(16) * 3 + torch.randint(0, 64, (120, 1))) % 64
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    if args.fault == "labels-all-masked":
        for row in rows[40:44]:
            row["labels"].fill_(-100)
    train_dataloader = DataLoader(rows[:104], batch_size=4)
    eval_dataloader = DataLoader(rows[104:], batch_size=4)
    no_decay = ["layernorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay[0])]},
        {
            "params": [p for n, p in model.named_parameters() if n.endswith(no_decay[0])],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=26)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for step, batch in enumerate(train_dataloader):
        model.train()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        record(step, accelerator.unwrap_model(model), loss=loss.detach())
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(4)))
    record.end(outputs.logits, loss=torch.cat(losses).mean())
    accelerator.end_training()


if __name__ == "__main__":
    main()
