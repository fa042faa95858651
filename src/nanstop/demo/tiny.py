"""Real architecture classes at toy size and a tokenizer trained in place: nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from nanstop.demo import data

if TYPE_CHECKING:
    from transformers import (
        Gemma3ForCausalLM,
        GemmaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

VOCAB = 512
SPECIAL = ("<pad>", "<eos>", "<bos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def _trained() -> str:
    """Return, as JSON, a byte-level BPE of ``VOCAB`` entries trained on the training rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for row in data.rows("train") for text in row.values())
    inner.train_from_iterator(texts, trainer)
    return inner.to_str()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a new tokenizer with a chat template; ids 0-4 are ``SPECIAL``."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    outer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    outer.chat_template = CHAT_TEMPLATE
    return outer


def _settings(overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    } | overrides


def gemma3(seed: int = 0, **overrides: Any) -> Gemma3ForCausalLM:
    """Return a text-only Gemma 3: four norms a layer, query and key norms, eager attention as
    its card advises.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    settings = _settings({"head_dim": 16, "sliding_window": 64} | overrides)
    return Gemma3ForCausalLM._from_config(Gemma3TextConfig(**settings), attn_implementation="eager")


def gemma(seed: int = 0, **overrides: Any) -> GemmaForCausalLM:
    """Return a Gemma: tied embedding, scaled by the square root of the width."""
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(seed)
    return GemmaForCausalLM(GemmaConfig(**_settings({"head_dim": 16} | overrides)))


def qwen2(seed: int = 0, attention: str = "sdpa", **overrides: Any) -> Qwen2ForCausalLM:
    """Return a Qwen2: biases on query, key and value."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM._from_config(
        Qwen2Config(**_settings(overrides)), attn_implementation=attention
    )


def qwen2_reward(seed: int = 0, **overrides: Any) -> Qwen2ForSequenceClassification:
    """Return a Qwen2 with a score head of one output."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(seed)
    settings = _settings({"num_labels": 1} | overrides)
    return Qwen2ForSequenceClassification(Qwen2Config(**settings))
