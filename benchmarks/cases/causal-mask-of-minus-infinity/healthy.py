"""The same training; the mask is boolean."""

from case import train

train(infinite=False)
