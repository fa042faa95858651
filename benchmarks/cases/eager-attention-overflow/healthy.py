"""The same training with fused attention."""

from case import train

train(attention="sdpa")
