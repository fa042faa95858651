"""Tiny real models and data for the cases:
random weights, a trained-in-place tokenizer, nothing downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor, nn

torch.set_num_threads(1)

VOCAB = 128
PAD, EOS = 0, 1


def llama(seed: int = 0, **overrides: Any) -> nn.Module:
    """Return a LlamaForCausalLM: 3 layers, hidden 64, 4 heads, 128 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _built(LlamaForCausalLM, LlamaConfig, seed, overrides)


def qwen2(seed: int = 0, **overrides: Any) -> nn.Module:
    """Return a Qwen2ForCausalLM: 3 layers, hidden 64, 4 heads, 128 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _built(Qwen2ForCausalLM, Qwen2Config, seed, overrides)


def build(kind: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """Return a model of any transformers class, by its name:
    3 layers, hidden 64, 4 heads, 128 tokens.
    """
    import transformers

    chosen = getattr(transformers, kind)
    return _built(chosen, chosen.config_class, seed, overrides)


def in_float16(trainer: type[Any]) -> type[Any]:
    """Return a subclass that computes the loss under float16 autocast:
    on CPU ``fp16=True`` is ignored.
    """

    class InFloat16(trainer):
        def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
            return torch.autocast("cpu", dtype=torch.float16, cache_enabled=bool(cache_enabled))

    return InFloat16


def _built(kind: Any, config: Any, seed: int, overrides: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": EOS,
    }
    return kind(config(**(settings | overrides)))


def token_batches(
    num: int, rows: int = 2, length: int = 16, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Return ``num`` batches of ids, mask and labels [rows, length]:
    runs of consecutive ids, which can be learned.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num):
        first = torch.randint(3, VOCAB - length, (rows, 1), generator=generator)
        ids = first + torch.arange(length)
        batches.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        )
    return batches


def words_tokenizer() -> Any:
    """Return a tokenizer of words ``w3`` ...
    ``w127`` with a chat template that joins the messages.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, VOCAB))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer


def sentence(first: int, length: int) -> str:
    """Return ``length`` consecutive words from number ``first`` on."""
    return " ".join(f"w{3 + (first + place) % (VOCAB - 3)}" for place in range(length))


def quiet_args(**overrides: Any) -> dict[str, Any]:
    """Return TrainingArguments for a silent CPU run of 8 steps that saves nothing."""
    return {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 0,
        "disable_tqdm": True,
    } | overrides


@torch.no_grad()
def finish(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Print the trained model's loss on ``batch``, in float32. The model is float32 afterwards."""
    model.float().eval()
    print(f"final_loss={float(model(**batch).loss):.6f}", flush=True)
