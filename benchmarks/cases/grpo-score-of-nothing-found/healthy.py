"""The same training; a completion without a number gets the worst score."""

from case import train

train(worst=True)
