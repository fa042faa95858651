"""The same training at the rate that suits sign updates."""

from case import train

train(rate=2e-3)
