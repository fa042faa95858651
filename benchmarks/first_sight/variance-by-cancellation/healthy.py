"""The same training; the variance is that of the differences from the mean."""

from case import train

train(two_passes=True)
