"""The same training with the attention that torch brings."""

from case import train

train(attention="sdpa")
