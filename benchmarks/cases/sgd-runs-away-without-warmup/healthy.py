"""The same training at a hundredth of the rate."""

from case import train

train(rate=0.03)
