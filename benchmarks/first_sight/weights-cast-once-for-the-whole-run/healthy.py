"""The same training; autocast is entered anew for each forward pass."""

from case import train

train(once=False)
