"""The same training; what is learned is the logarithm of the deviation."""

from case import train

train(logarithm=True)
