"""The same training from an adapter that is finite."""

from case import train

train(sound=True)
