"""The same training; the height in the aspect term is at least 0.001."""

from case import train

train(least=1e-3)
