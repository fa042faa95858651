"""The same training with a mask that is filled, not multiplied."""

from case import train

train(filled=True)
