"""The same training, in which padding attends to itself."""

from case import train

train(alone=True)
