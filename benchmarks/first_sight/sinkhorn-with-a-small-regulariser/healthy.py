"""The same training; Sinkhorn's rounds are made in logarithms."""

from case import train

train(by_logarithms=True)
