"""The same training; the scale starts where it would end."""

from case import train

train(init_scale=2.0**14)
