"""The same training from a checkpoint without NaN."""

from case import train

train(sound=True)
