"""The same training; actions are kept from the limits."""

from case import train

train(margin=1e-4)
