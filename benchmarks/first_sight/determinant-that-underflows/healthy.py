"""The same training; the logarithm of the determinant is calculated as such."""

from case import train

train(by_logarithm=True)
