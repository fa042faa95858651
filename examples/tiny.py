"""What the examples train: a tokenizer made from a few sentences, and a small random model.

In your own training both come from `from_pretrained`. Nothing here is downloaded.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
SUMS = [(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(8) for b in range(8)]
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False
    )
    inner.train_from_iterator((text for pair in SUMS for text in pair), trainer)
    outer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    outer.chat_template = CHAT
    return outer


def config(**other: object) -> LlamaConfig:
    """Return the configuration of a Llama with 2 layers of width 64."""
    return LlamaConfig(vocab_size=384, **(SIZES | other))


def model() -> LlamaForCausalLM:
    """Return a random Llama."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config())
