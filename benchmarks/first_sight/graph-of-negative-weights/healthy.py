"""The same training; the degree is the sum of the sizes of the weights."""

from case import train

train(by_size=True)
