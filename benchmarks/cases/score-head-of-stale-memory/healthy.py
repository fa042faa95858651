"""The same training with a head that is initialised."""

from case import train

train(initialised=True)
