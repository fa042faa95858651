"""The same training with the biased variance."""

from case import train

train(unbiased=False)
