"""The same training at the rate that is usual for T5."""

from case import train

train(rate=1e-2)
