"""Blocks of models, however they are held; what is tied and packed is tried in ``hosts/model``."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration  # not on `meta`: torch 2.6 cannot

from nanstop.numerics.modules import repeated_blocks


def block(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Mixed(nn.Module):
    """A block of another class than ``block()``, with experts of its own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(block() for _ in range(2))


def held(**parts):
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def t5():
    config = T5Config(
        vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=2, num_heads=2
    )
    return T5ForConditionalGeneration(config)


STACKED = nn.Sequential(nn.Sequential(block(), block()), nn.Sequential(block(), block()))
MODELS = {
    "of two classes": (
        lambda: held(layers=nn.ModuleList([block(), Mixed(), block()])),
        ("layers.0", "layers.1", "layers.2"),
    ),
    "with an embedding": (
        lambda: held(layers=nn.ModuleList([nn.Embedding(4, 4), block(), block()])),
        ("layers.1", "layers.2"),
    ),
    "in a sequence": (lambda: held(body=nn.Sequential(Mixed(), Mixed())), ("body.0", "body.1")),
    "in stages": (lambda: STACKED, ("0", "1")),
    "encoder and decoder": (t5, ("encoder.block.0", "decoder.block.0", "decoder.block.1")),
    "layers without parts": (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), ()),
    "heads": (lambda: held(heads=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))), ()),
    "one after the other": (lambda: nn.Sequential(nn.Linear(4, 4), block(), nn.Linear(4, 1)), ()),
}


@pytest.mark.parametrize("kind", MODELS)
def test_blocks(kind):
    made, blocks = MODELS[kind]
    with torch.device("meta"):
        assert repeated_blocks(made()) == blocks
