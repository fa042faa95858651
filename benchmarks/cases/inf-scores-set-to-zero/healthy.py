"""The same training with fused attention, which scales and adds up in float32."""

from case import train

train(attention="sdpa")
