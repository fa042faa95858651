"""The same training of a sound checkpoint."""

from case import train

train(damaged=False)
