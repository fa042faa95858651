"""The same training, unscaled before it is clipped."""

from case import train

train(unscale_first=True)
