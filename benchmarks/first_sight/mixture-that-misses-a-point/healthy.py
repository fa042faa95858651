"""The same training; components are summed in logarithms."""

from case import train

train(by_logarithms=True)
