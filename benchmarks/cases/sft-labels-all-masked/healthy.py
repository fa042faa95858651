"""The same training with the answers kept."""

from case import train

train(keep_answers=True)
