"""The same training with a loss scale that fits."""

from case import train

train(scale=16.0)
