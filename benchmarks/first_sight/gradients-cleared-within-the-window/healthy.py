"""The same training; gradients are cleared after the update."""

from case import train

train(clear_after=True)
