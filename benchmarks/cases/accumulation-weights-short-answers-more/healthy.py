"""The same training with the loss of a window divided by its tokens."""

from case import train

train(by_token=True)
