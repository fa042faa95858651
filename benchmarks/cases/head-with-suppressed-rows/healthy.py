"""The same training; their logits are -1e4."""

from case import train

train(value=-1e4)
