"""The same training with the weights loaded before the copies are taken."""

from case import train

train(load_first=True)
