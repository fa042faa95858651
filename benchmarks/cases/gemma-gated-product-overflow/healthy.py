"""The same training without autocast."""

from case import train

train(half=False)
