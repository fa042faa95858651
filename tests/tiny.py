"""Tiny real models, tokenizers and data sets for tests. Nothing is downloaded."""

from __future__ import annotations

import dataclasses

import torch


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(60))])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    outer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )
    outer.chat_template = "{% for m in messages %}{{m['content']}} {% endfor %}"
    return outer


def llama(seed: int = 0, **overrides):
    """A two-layer LlamaForCausalLM, vocabulary 64, hidden 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def checkpointing(reentrant: bool | None) -> dict[str, object]:
    """The training arguments that switch checkpointing on, off with None, in this version's
    words.
    """
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if n in names)
    if reentrant is None:
        return {name: False}
    return {name: True, f"{name}_kwargs": {"use_reentrant": reentrant}}


def recompute(model, *, reentrant: bool) -> None:
    """Switch a model's checkpointing on."""
    later = getattr(model, "activation_checkpointing_enable", None)
    (later or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


class TokenRows(torch.utils.data.Dataset):
    """``num_rows`` rows of ``length`` random ids, the same for the same index."""

    def __init__(self, num_rows: int = 80, length: int = 16, vocab: int = 64) -> None:
        self.num_rows, self.length, self.vocab = num_rows, length, vocab

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, self.vocab, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def training_args(out, **overrides):
    """Quiet CPU TrainingArguments for eight steps."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "learning_rate": 1e-3,
    } | overrides
