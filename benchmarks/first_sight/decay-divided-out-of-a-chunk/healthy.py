"""The same training; differences of decays are formed before the exponential."""

from case import train

train(pairwise=True)
